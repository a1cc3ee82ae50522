"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

import os
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from sync_service.errors import StorageFailed
from sync_service.stamps import StampedTable
from sync_service.tables import Table

Mapped: TypeAlias = np.memmap[tuple[int, ...], np.dtype[Any]]


class MappedTable(StampedTable):
    """A stamped table whose rows and stamps are mapped from two files in a folder."""

    def __init__(self, table: Table, directory: Path) -> None:
        stem = quote(table.name, safe="")
        rows = _map(directory / f"{stem}.rows", table.dtype, (table.rows, table.dim))
        stamps = _map(directory / f"{stem}.stamps", np.dtype(np.int64), (table.rows,))
        super().__init__(table, rows, stamps)
        self._mapped = (rows, stamps)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        for array in self._mapped:
            array.flush()


def _map(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Mapped:
    size = int(np.prod(shape)) * dtype.itemsize
    if not path.exists():
        _allocate(path, size)
    if path.stat().st_size != size:
        raise StorageFailed(
            f"{path} has {path.stat().st_size} bytes, expected {size}: restore the data directory from a copy, "
            "or start an empty one for a full resync"
        )
    return np.memmap(path, dtype, mode="r+", shape=shape)


def _allocate(path: Path, size: int) -> None:
    """Reserve the file's blocks at once: a full disk is then an error here, not a crash at a later write."""
    unfinished = path.with_suffix(path.suffix + ".new")
    with unfinished.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            unfinished.unlink()
            raise StorageFailed(f"{path}: cannot reserve {size} bytes: {error.strerror}") from error
    unfinished.rename(path)
