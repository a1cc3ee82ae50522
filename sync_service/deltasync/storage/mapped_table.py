"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import quote

import numpy as np
import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.storage.data_directory import RESTORE

_STAMP_TYPE = np.dtype(np.int64)
_BLOCK_BYTES = 1 << 20

Mapped: TypeAlias = np.memmap[tuple[int, ...], np.dtype[Any]]


class MappedTable(StampedTable):
    """A stamped table whose rows and stamps are mapped from two files in a folder.

    A `new` one is made, all zero; otherwise its files must be there.
    """

    def __init__(self, table: TableSpec, directory: Path, *, new: bool) -> None:
        rows, stamps = _mapped(table, directory, new=new)
        super().__init__(table, rows, stamps)
        self._mapped = (rows, stamps)

    def extend(self, spec: TableSpec, directory: Path) -> Callable[[], None]:
        """Make room for what the table is to be, which may have more rows. Blocks; any thread.

        Returns:
            What makes the table that, with zeros in new rows: for the thread that changes it.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        extend_files(spec, directory)
        arrays = _mapped(spec, directory, new=False)
        return partial(self._become, spec, *arrays)

    def _become(self, spec: TableSpec, rows: Mapped, stamps: Mapped) -> None:
        self.counts = self.counts.plus_unchanged(spec.rows - self.spec.rows)
        self.index.extend(stamps)
        self.spec, self.rows, self.stamps, self._mapped = spec, rows, stamps, (rows, stamps)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        for array in self._mapped:
            array.flush()


def extend_files(table: TableSpec, directory: Path) -> None:
    """Make room in a table's files for as many rows as it is to have, with zeros.

    Raises:
        StorageFailed: there is no room.
    """
    rows_file, stamps_file = _files(table, directory)
    extend_file(rows_file, table.nbytes)
    extend_file(stamps_file, table.rows * _STAMP_TYPE.itemsize)


def extend_file(path: Path, size: int) -> None:
    """Make room in a file for so many bytes, the new ones zero; one that is as long stays so.

    Raises:
        StorageFailed: there is no room; the file is as it was.
    """
    before = path.stat().st_size
    if before >= size:
        return
    with path.open("r+b") as file:
        try:
            reserve(file, size, str(path))
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise


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


def _mapped(table: TableSpec, directory: Path, *, new: bool) -> tuple[Mapped, Mapped]:
    """The rows and the stamps of a table."""
    rows_file, stamps_file = _files(table, directory)
    rows = map_array(rows_file, table.dtype, (table.rows, table.dim), new=new)
    return rows, map_array(stamps_file, _STAMP_TYPE, (table.rows,), new=new)


def map_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, new: bool) -> Mapped:
    """An array mapped from a file; a `new` one is made, all zero.

    One that has more, but zeros only, was being extended when its process ended: it is made as short as before.

    Raises:
        StorageFailed: there is no room, or the file is missing or of another size.
    """
    size = math.prod(shape) * dtype.itemsize
    if new:
        _allocate(path, size)
    elif path.exists() and path.stat().st_size > size and not _anything_after(path, size):
        os.truncate(path, size)
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


def _anything_after(path: Path, size: int) -> bool:
    """Whether a file has anything but zeros after so many bytes."""
    with path.open("rb") as file:
        file.seek(size)
        return any(block.count(0) < len(block) for block in iter(partial(file.read, _BLOCK_BYTES), b""))


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries: a table's files must not be lost once the log names the table."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
