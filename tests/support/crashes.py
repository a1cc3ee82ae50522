"""Copies of a data directory at every point where a process could crash."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.faults import Hook
from tests.support.local_service import faults_of

from deltasync.checkpoints.file_storage import UNFINISHED, Place
from deltasync.service.service import Service


class Crashes:
    """Copies of the directory before and after each write or removal of a small record or a checkpoint file.

    With `appends`, also after each record of a stream, such as a part of a cut.
    """

    def __init__(self, data_dir: Path, into: Path, *, appends: bool = False) -> None:
        self.copies: list[Path] = []
        self._data_dir, self._into, self._appends = data_dir, into, appends
        self._files = threading.Lock()

    @contextmanager
    def of(self, service: Service) -> Iterator[None]:
        """Make copies while the block runs."""
        faults, log = faults_of(service), dict[str, Hook](put=self._record)
        if self._appends:
            log["append"] = self._append
        with faults.log.replaced(**log), faults.place.replaced(put=self._put, remove=self._remove):
            yield

    def copy(self, when: str) -> Path:
        folder = self._into / f"{len(self.copies):03} {when}"
        shutil.copytree(self._data_dir, folder)
        self.copies.append(folder)
        return folder

    def _record(self, put: Hook, name: str, value: bytes | None, **named: Any) -> Future[None]:
        self.copy(f"before {name.replace('/', ' ')} is written")
        written: Future[None] = put(name, value, **named)
        written.result(20)
        self.copy(f"after {name.replace('/', ' ')} is written")
        return written

    def _append(self, append: Hook, stream: str, *key: Any, **named: Any) -> Future[None]:
        written: Future[None] = append(stream, *key, **named | {"patient": False})
        written.result(20)
        self.copy(f"after a record of {stream.replace('/', ' ')} is written")
        return written

    def _put(self, put: Hook, place: Place, name: str, content: bytes | memoryview) -> None:
        with self._files:  # Several threads write the copies of files.
            copy = self.copy("while a file is written")
            half = copy / Path(f"{place.url}/{name}{UNFINISHED}").relative_to(self._data_dir)
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_bytes(content[: len(content) // 2])
            put(place, name, content)
            self.copy("after a file is written")

    def _remove(self, remove: Hook, place: Place, name: str) -> None:
        self.copy("before a file is removed")
        remove(place, name)
        self.copy("after a file is removed")
