"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

import math
import os
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import quote

import numpy as np
import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.storage.data_directory import RESTORE

Mapped: TypeAlias = np.memmap[tuple[int, ...], np.dtype[Any]]


class MappedTable(StampedTable):
    """A stamped table whose rows and stamps are mapped from two files in a folder.

    A `new` one is made, all zero; otherwise its files must be there.
    """

    def __init__(self, table: TableSpec, directory: Path, *, new: bool) -> None:
        rows_file, stamps_file = _files(table, directory)
        rows = map_array(rows_file, table.dtype, (table.rows, table.dim), new=new)
        stamps = map_array(stamps_file, np.dtype(np.int64), (table.rows,), new=new)
        super().__init__(table, rows, stamps)
        self._mapped = (rows, stamps)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        for array in self._mapped:
            array.flush()


def remove_files(table: TableSpec, directory: Path) -> None:
    """Remove a table's files, as far as they exist."""
    for file in _files(table, directory):
        file.unlink(missing_ok=True)


def reserve(file: BinaryIO, size: int, what: str) -> None:
    """Reserve a file's blocks at once: a full disk is then an error here, not a crash at a later write.

    Raises:
        StorageFailed: there is no room.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise StorageFailed(f"{what}: cannot reserve {size} bytes: {error.strerror}") from error


def file_of(table: TableSpec, directory: Path, kind: str) -> Path:
    """The file of one of a table's arrays; its name is unique and short, however long the table's name is."""
    stem = f"{quote(table.name, safe='')[:100]}-{xxhash.xxh3_64_hexdigest(table.name.encode())}"
    return directory / f"{stem}.{kind}"


def _files(table: TableSpec, directory: Path) -> tuple[Path, Path]:
    return file_of(table, directory, "rows"), file_of(table, directory, "stamps")


def map_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, new: bool) -> Mapped:
    """An array mapped from a file; a `new` one is made, all zero.

    Raises:
        StorageFailed: there is no room, or the file is missing or of another size.
    """
    size = math.prod(shape) * dtype.itemsize
    if new:
        _allocate(path, size)
    found = path.stat().st_size if path.exists() else None
    if found != size:
        has = "is missing" if found is None else f"has {found} bytes"
        raise StorageFailed(f"{path} {has}, expected {size} bytes: {RESTORE}")
    return np.memmap(path, dtype, mode="r+", shape=shape)


def _allocate(path: Path, size: int) -> None:
    unfinished = path.with_name(path.name + ".new")
    try:
        with unfinished.open("wb") as file:
            reserve(file, size, str(path))
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries: a table's files must not be lost once the log names the table."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
