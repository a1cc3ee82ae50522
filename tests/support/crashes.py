"""Copies of a data directory at every point where a process could crash."""

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from deltasync.checkpoints.file_storage import UNFINISHED, Place
from deltasync.log.lmdb_store import LmdbStore


class Crashes:
    """Copies of the directory before and after each write or removal of a small record or a checkpoint file.

    With `appends`, also after each record of a stream, such as a part of a cut.
    """

    def __init__(self, patch: pytest.MonkeyPatch, data_dir: Path, into: Path, *, appends: bool = False) -> None:
        self.copies: list[Path] = []
        self._data_dir = data_dir
        self._into = into
        files = threading.Lock()
        record, append, put, remove = LmdbStore.put, LmdbStore.append, Place.put, Place.remove

        def recording(log: LmdbStore, name: str, value: bytes | None, **named: Any) -> Future[None]:
            self._copy(f"before {name.replace('/', ' ')} is written")
            written = record(log, name, value, **named)
            written.result(20)
            self._copy(f"after {name.replace('/', ' ')} is written")
            return written

        def appending(log: LmdbStore, stream: str, *key: Any, **named: Any) -> Future[None]:
            written = append(log, stream, *key, **named | {"patient": False})
            written.result(20)
            self._copy(f"after a record of {stream.replace('/', ' ')} is written")
            return written

        def putting(place: Place, name: str, content: bytes | memoryview) -> None:
            with files:  # Several threads write the copies of files.
                copy = self._copy("while a file is written")
                half = copy / Path(f"{place.url}/{name}{UNFINISHED}").relative_to(data_dir)
                half.parent.mkdir(parents=True, exist_ok=True)
                half.write_bytes(content[: len(content) // 2])
                put(place, name, content)
                self._copy("after a file is written")

        def removing(place: Place, name: str) -> None:
            self._copy("before a file is removed")
            remove(place, name)
            self._copy("after a file is removed")

        patch.setattr(LmdbStore, "put", recording)
        if appends:
            patch.setattr(LmdbStore, "append", appending)
        patch.setattr(Place, "put", putting)
        patch.setattr(Place, "remove", removing)

    def _copy(self, when: str) -> Path:
        folder = self._into / f"{len(self.copies):03} {when}"
        shutil.copytree(self._data_dir, folder)
        self.copies.append(folder)
        return folder
