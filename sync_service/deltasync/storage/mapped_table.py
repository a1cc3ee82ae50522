"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import quote

import numpy as np
import xxhash

from deltasync.core.digests import RowDigests, Squares
from deltasync.core.errors import StorageFailed
from deltasync.core.stamps import StampedTable, has_norm
from deltasync.core.tables import TableSpec
from deltasync.storage.data_directory import RESTORE

_STAMP_TYPE = np.dtype(np.int64)
_BLOCK_BYTES = 1 << 20
# The arrays of a table, each in a file of this name; older versions wrote the first two.
_ROWS, _STAMPS, _DIGESTS, _SQUARES = "rows", "stamps", "digests", "squares"

Mapped: TypeAlias = np.memmap[tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True)
class TableLayout:
    """What files a table has.

    Attributes:
        spec: the table.
        columns: where segments of its columns end, see `StampedTable`.
        normed: whether squared norms are kept.
    """

    spec: TableSpec
    columns: tuple[int, ...]
    normed: bool

    @classmethod
    def of(cls, spec: TableSpec, columns: Sequence[int] = (), *, normed: bool | None = None) -> "TableLayout":
        """The layout of a table; its norm is kept if it has one, unless it is said."""
        return cls(spec, tuple(columns) or (0, spec.dim), has_norm(spec) if normed is None else normed)

    def arrays(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Type and shape of each array, by its name."""
        rows, segments = self.spec.rows, len(self.columns) - 1
        arrays: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            _ROWS: (self.spec.dtype, (rows, self.spec.dim)),
            _STAMPS: (np.dtype(np.int64), (rows,)),
            _DIGESTS: (np.dtype(np.uint64), (rows, segments)),
        }
        return arrays | ({_SQUARES: (np.dtype(np.float32), (rows, segments))} if self.normed else {})

    def file(self, folder: Path, name: str) -> Path:
        """The file of one of the arrays; those of other segments are others."""
        inner = self.columns[1:-1]
        if inner and name in (_DIGESTS, _SQUARES):
            name = f"{xxhash.xxh3_64_hexdigest(repr(inner).encode())}.{name}"
        return file_of(self.spec, folder, name)

    def files(self, folder: Path) -> list[Path]:
        """All of them."""
        return [self.file(folder, name) for name in self.arrays()]

    def map(self, folder: Path, name: str, *, new: bool) -> Mapped:
        """One of the arrays: see `map_array`."""
        return map_array(self.file(folder, name), *self.arrays()[name], new=new)


class MappedTable(StampedTable):
    """A stamped table whose arrays are mapped from files in a folder.

    A `new` one is made, all zero; otherwise its files must be there, but for those that older versions did not
    write: what is in them is found in the rows.
    """

    def __init__(
        self,
        table: TableSpec,
        folder: Path,
        *,
        new: bool,
        columns: Sequence[int] = (),
        normed: bool | None = None,
    ) -> None:
        """See `TableLayout`."""
        layout = self._layout = TableLayout.of(table, columns, normed=normed)
        self._folder = folder
        self._stale = set[Path]()
        old = not new and not layout.file(folder, _DIGESTS).exists()
        late = {_DIGESTS, _SQUARES} if old else set()
        self._mapped = {name: layout.map(folder, name, new=new or name in late) for name in layout.arrays()}
        rows, stamps, digests, squares = _plain(self._mapped, layout)
        super().__init__(table, rows, stamps, digests, squares, layout.columns)
        if old:
            self.make_digests()

    def extend(self, spec: TableSpec) -> Callable[[], None]:
        """Make room for what the table is to be, which may have more rows. Blocks; any thread.

        Returns:
            What makes the table that, with zeros in new rows: for the thread that changes it.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        layout = replace(self._layout, spec=spec)
        extend_files(layout, self._folder)
        arrays = {name: layout.map(self._folder, name, new=False) for name in layout.arrays()}
        return partial(self._become, layout, arrays)

    def _become(self, layout: TableLayout, arrays: dict[str, Mapped]) -> None:
        self.counts = self.counts.plus_unchanged(layout.spec.rows - self.spec.rows)
        self.spec, self._layout, self._mapped = layout.spec, layout, arrays
        self.rows, self.stamps, self.digests, self.squares = _plain(arrays, layout)
        self.index.extend(self.stamps)

    def _room_of(self, columns: tuple[int, ...]) -> tuple[RowDigests, Squares]:
        """Files of other segments. Those of before stay as long as the log may name them."""
        layout = replace(self._layout, columns=columns)
        names = layout.arrays().keys() - {_ROWS, _STAMPS}
        arrays = {name: layout.map(self._folder, name, new=True) for name in names}
        self._stale |= {self._layout.file(self._folder, name) for name in names}
        self._layout, self._mapped = layout, self._mapped | arrays
        _, _, digests, squares = _plain(self._mapped, layout)
        return digests, squares

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        for array in self._mapped.values():
            array.flush()

    def remove_stale(self) -> None:
        """Remove the files of segments that there were: the log names those that there are."""
        while self._stale:
            self._stale.pop().unlink(missing_ok=True)


def _plain(arrays: Mapping[str, Mapped], layout: TableLayout) -> list[Any]:
    """Rows, stamps, digests and squares as NumPy has them."""
    none = np.empty((0, len(layout.columns) - 1), np.float32)
    names = (_ROWS, _STAMPS, _DIGESTS, _SQUARES)
    return [arrays[name].view(np.ndarray) if name in arrays else none for name in names]


def extend_files(layout: TableLayout, folder: Path) -> None:
    """Make room in a table's files for as many rows as it is to have, with zeros.

    Raises:
        StorageFailed: there is no room.
    """
    for name, (dtype, shape) in layout.arrays().items():
        extend_file(layout.file(folder, name), math.prod(shape) * dtype.itemsize)


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


def remove_files(table: TableSpec, folder: Path) -> None:
    """Remove a new table's files, as far as they exist."""
    for file in TableLayout.of(table).files(folder):
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
