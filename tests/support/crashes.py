"""Copies of a data directory at every point at which a process could end."""

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from deltasync.storage import files
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.mapped_table import MappedTable


class Crashes:
    """What would be there if the process ended now: around each time that a file grows or a record is written."""

    def __init__(self, patch: pytest.MonkeyPatch, data_dir: Path, into: Path) -> None:
        self.copies: list[Path] = []
        self._data_dir = data_dir
        self._into = into
        reserve, put, become = files.reserve, LmdbStore.put, MappedTable._become

        def reserving(file: Any, size: int, what: str, path: Path) -> None:
            self._copy("before a file grows")
            before = os.fstat(file.fileno()).st_size
            os.ftruncate(file.fileno(), before + (size - before) // 2)
            self._copy("while it grows")
            reserve(file, size, what, path)
            self._copy("after it has grown")

        def putting(log: LmdbStore, name: str, value: bytes | None, **named: Any) -> Future[None]:
            self._copy(f"before {name.replace('/', ' ')} is written")
            written = put(log, name, value, **named)
            written.result(20)
            self._copy(f"after {name.replace('/', ' ')} is written")
            return written

        def becoming(table: MappedTable, *arguments: Any) -> None:
            self._copy("before a table has more rows")
            become(table, *arguments)
            self._copy("after a table has more rows")

        patch.setattr(files, "reserve", reserving)
        patch.setattr(LmdbStore, "put", putting)
        patch.setattr(MappedTable, "_become", becoming)

    def _copy(self, when: str) -> None:
        folder = self._into / f"{len(self.copies):02} {when}"
        shutil.copytree(self._data_dir, folder)
        self.copies.append(folder)
