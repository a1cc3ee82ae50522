"""Copies of a data directory at every point where a process could crash."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.faults import Faults, Hook

from deltasync.checkpoints.file_storage import UNFINISHED, Place


class Crashes:
    """Copies of the directory before and after each write or removal of a small record or a checkpoint file.

    With `appends`, also after each record of a stream, such as a part of a cut.
    """

    def __init__(self, data_dir: Path, into: Path, *, appends: bool = False) -> None:
        self.copies: list[Path] = []
        self._data_dir, self._into, self._appends = data_dir, into, appends
        self._files = threading.Lock()

    @contextmanager
    def of(self, faults: Faults) -> Iterator[None]:
        """Copy while the block runs."""
        appending = {"append": self._append} if self._appends else {}
        with (
            faults.log.replaced(put=self._record, **appending),
            faults.place.replaced(put=self._put, remove=self._remove),
        ):
            yield

    def copy(self, when: str) -> Path:
        folder = self._into / f"{len(self.copies):03} {when}"
        shutil.copytree(self._data_dir, folder)
        self.copies.append(folder)
        return folder

    def _record(self, call: Hook, name: str, value: bytes | None, **named: Any) -> "Future[None]":
        self.copy(f"before {name.replace('/', ' ')} is written")
        written: Future[None] = call(name, value, **named)
        written.result(20)
        self.copy(f"after {name.replace('/', ' ')} is written")
        return written

    def _append(self, call: Hook, stream: str, *key: Any, **named: Any) -> "Future[None]":
        written: Future[None] = call(stream, *key, **named | {"patient": False})
        written.result(20)
        self.copy(f"after a record of {stream.replace('/', ' ')} is written")
        return written

    def _put(self, call: Hook, place: Place, name: str, content: bytes | memoryview) -> None:
        with self._files:  # Several threads write the copies of files.
            copy = self.copy("while a file is written")
            half = copy / Path(f"{place.url}/{name}{UNFINISHED}").relative_to(self._data_dir)
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_bytes(content[: len(content) // 2])
            call(place, name, content)
            self.copy("after a file is written")

    def _remove(self, call: Hook, place: Place, name: str) -> None:
        self.copy("before a file is removed")
        call(place, name)
        self.copy("after a file is removed")
