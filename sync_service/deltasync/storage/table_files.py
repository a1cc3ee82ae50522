"""The files of tables: large ones have a file for each array, the small ones that are made together share one.

By default Linux lets a process have 65,530 mappings, and a few for every table of every consumer are too many. A
file of a table's own can grow with it; out of a shared one it moves.
"""

import math
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids
from deltasync.kernels import touched as kernels
from deltasync.kernels.touched import Bytes, Marks
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.files import allocate, extend, make_folder, writing
from deltasync.storage.mapping import Mapping, TouchedArray, map_file
from deltasync.storage.touched import MAX_ARRAYS, Touched

# A table of fewer bytes is small.
SMALL_BYTES = 16 << 20
# The file that small tables share.
SHARED = "shared"
_ALIGNED_BYTES = 64  # A line of the processor's cache.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ArraySpec:
    """An array of a table.

    Attributes:
        file: the name of its file, if it has one of its own.
        dtype: of its values.
        shape: the first number is that of the table's rows.
        alone: whether it has a file of its own, also in a small table.
    """

    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


ArraySpecs: TypeAlias = Sequence[ArraySpec]
Map: TypeAlias = Callable[[Path], Mapping]


@dataclass(frozen=True)
class Place:
    """Where a table's arrays are: in files of their own in a folder, or in the one that its small tables share,
    from byte `offset` on.
    """

    folder: Path
    offset: int | None = None


@dataclass(frozen=True, eq=False)
class TableFiles:
    """The arrays of a table, and what they are mapped from.

    Attributes:
        place: where they are.
        arrays: the arrays.
        mappings: of each.
        touched: what was written and is not flushed.
        first: the bit of the first of the arrays in it.
    """

    place: Place
    arrays: tuple[NDArray[Any], ...]
    mappings: tuple[Mapping, ...]
    touched: Touched
    first: int = 0

    @classmethod
    def of(cls, place: Place, arrays: Sequence[NDArray[Any]], mappings: Sequence[Mapping]) -> "TableFiles":
        """All of a table's arrays, of which nothing was written."""
        # By the first: blocks are the same, whatever segments the others have.
        touched = Touched(len(arrays[0]), _row_bytes(arrays[0]))
        return cls(place, tuple(arrays), tuple(mappings), touched)

    def part(self, start: int, end: int) -> "TableFiles":
        """Some of the arrays."""
        arrays, mappings = self.arrays[start:end], self.mappings[start:end]
        return TableFiles(self.place, arrays, mappings, self.touched, self.first + start)

    def touch(self, ids: Ids | None, arrays: int) -> None:
        """Note that rows were written: these ids ([n]), or else all. Of the arrays the first is bit 0."""
        bits = self._bits(arrays)
        if ids is None:
            self.touched.note_all(bits)
        else:
            self.touched.note(ids, bits)

    def with_others(self, arrays: ArraySpecs, start: int) -> "TableFiles":
        """With other arrays from array `start` on: in new files of their own, all zero.

        Raises:
            StorageFailed: there is no room.
        """
        for each in arrays[start:]:
            make_anew(self.place, each)  # One may be of a process that ended before it was named.
        mappings = [map_file(self.place.folder / each.file, empty=True) for each in arrays[start:]]
        others = [m.array(each.dtype, each.shape) for m, each in zip(mappings, arrays[start:], strict=True)]
        return TableFiles.of(self.place, (*self.arrays[:start], *others), (*self.mappings[:start], *mappings))

    def remove(self, array: ArraySpec) -> None:
        """Remove an array's own file, if it had one."""
        (self.place.folder / array.file).unlink(missing_ok=True)

    def extended(self, arrays: ArraySpecs) -> "TableFiles":
        """Make room, in its own files, for longer arrays, with zeros; they are to `begin_with` what is here.

        Raises:
            StorageFailed: there is no room; the files are as they were, or longer.
        """
        self.lengthen(arrays)
        return open_tables([(self.place, arrays)])[0]

    def lengthen(self, arrays: ArraySpecs) -> None:
        """Make its own files as long as longer arrays need, with zeros; those that are as long stay so.

        Raises:
            StorageFailed: there is no room; the files are as they were, or longer.
        """
        for each in arrays:
            extend(self.place.folder / each.file, each.nbytes)

    def begin_with(self, others: "TableFiles", count: int) -> None:
        """Let the first arrays begin with what is in others, which are as long, or shorter. On the thread that
        writes these.

        Arrays in the same files have what was flushed of each other.
        """
        if others.touched is self.touched:
            return
        bits = (1 << count) - 1
        marks = others.touched.pending() & np.uint16(bits)
        if self.place != others.place:
            marks[:] = bits
        for number, (array, source) in enumerate(zip(self.arrays[:count], others.arrays, strict=False)):
            if array is not source:
                rows = 1 << self.touched.shift
                kernels.copy(_bytes(source), marks, 1 << number, _row_bytes(source) * rows, _bytes(array))
        self.touched.add(marks)

    def written(self, marks: Marks) -> list[tuple[Mapping, TouchedArray]]:
        """The arrays of which some rows are to be written, as these marks say; those of shared mappings, too."""
        rows, found = 1 << self.touched.shift, list[tuple[Mapping, TouchedArray]]()
        for number, (array, mapping) in enumerate(zip(self.arrays, self.mappings, strict=True)):
            bit = 1 << self.first + number
            if not mapping.private or (marks & np.uint16(bit)).any():
                found.append((mapping, TouchedArray(_bytes(array), marks, bit, _row_bytes(array) * rows)))
        return found

    def taken(self) -> AbstractContextManager[Marks]:
        """What was written and is not flushed, to be flushed now."""
        return self.touched.taken(self._bits((1 << MAX_ARRAYS) - 1))

    def _bits(self, arrays: int) -> int:
        return (arrays & (1 << len(self.arrays)) - 1) << self.first


def make_anew(place: Place, array: ArraySpec) -> None:
    """Make an array's own file, all zero, instead of one that may be there.

    Raises:
        StorageFailed: there is no room.
    """
    (place.folder / array.file).unlink(missing_ok=True)
    allocate(place.folder / array.file, array.nbytes)


def flush(tables: Iterable[TableFiles]) -> None:
    """Wait until everything written to tables before the call is on disk. Any thread, while others go on writing.

    Of what is written meanwhile a part may get there too: until the next flush the log has all of it.

    Raises:
        StorageFailed: the disk refused it; the next flush writes it again.
    """
    with ExitStack() as stack:
        written = defaultdict[Mapping, list[TouchedArray]](list)
        # In one order: two flushes that share tables must not wait for each other.
        for table in sorted(tables, key=lambda table: id(table.touched)):
            for mapping, array in table.written(stack.enter_context(table.taken())):
                written[mapping].append(array)
        for mapping, arrays in written.items():
            mapping.flush(arrays)


def make_tables(parent: Path, tables: Sequence[ArraySpecs]) -> list[TableFiles]:
    """Make tables' files, all zero, in a new folder.

    Raises:
        StorageFailed: there is no room; nothing is left of them.
    """
    folder = parent / uuid.uuid4().hex
    try:
        with writing(f"{folder} cannot be made", folder):
            return _made(folder, tables)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _made(folder: Path, tables: Sequence[ArraySpecs]) -> list[TableFiles]:
    make_folder(folder)
    sizes = [_room(each) if _is_small(each) else 0 for each in tables]
    if any(sizes):
        allocate(folder / SHARED, sum(sizes))
    for arrays in tables:
        for each in arrays:
            if each.alone or not _is_small(arrays):
                allocate(folder / each.file, each.nbytes)
    starts = accumulate(sizes, initial=0)
    places = [Place(folder, start if size else None) for start, size in zip(starts, sizes, strict=False)]
    return _opened(list(zip(places, tables, strict=True)), partial(map_file, empty=True))


def open_tables(tables: Sequence[tuple[Place, ArraySpecs]]) -> list[TableFiles]:
    """Open tables' files; each is mapped once.

    A file of one array that has more, but zeros only, was being extended when its process ended: it is made as
    short as before.

    Raises:
        StorageFailed: a file is missing or of another size, or cannot be opened now; or there is no room in the
            process's memory.
    """
    folder = tables[0][0].folder.parent if tables else Path()
    with writing(f"tables in {folder} cannot be opened", folder):
        return _opened(tables, map_file)


def offsets(sizes: Iterable[int], start: int = 0) -> list[int]:
    """Where arrays of so many bytes begin, from `start` on, and where the last of them ends."""
    return list(accumulate((-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes), initial=start))


def _row_bytes(array: NDArray[Any]) -> int:
    return array.nbytes // len(array)


def _bytes(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _is_small(arrays: ArraySpecs) -> bool:
    return sum(each.nbytes for each in arrays) < SMALL_BYTES


def _room(arrays: ArraySpecs) -> int:
    """Bytes of a small table in a shared file."""
    return offsets(0 if each.alone else each.nbytes for each in arrays)[-1]


def _opened(tables: Sequence[tuple[Place, ArraySpecs]], map_path: Map) -> list[TableFiles]:
    ends = {place.folder: 0 for place, _ in tables if place.offset is not None}
    for place, arrays in tables:
        if place.offset is not None:
            ends[place.folder] = max(ends[place.folder], place.offset + _room(arrays))
    shared = {folder: _map_shared(folder / SHARED, end, map_path) for folder, end in ends.items()}
    return [_opened_one(place, arrays, shared.get(place.folder), map_path) for place, arrays in tables]


def _opened_one(place: Place, arrays: ArraySpecs, shared: Mapping | None, map_path: Map) -> TableFiles:
    if place.offset is None or shared is None:
        return _opened_alone(place, arrays, map_path)
    starts = offsets((0 if each.alone else each.nbytes for each in arrays), place.offset)
    found, mappings = list[NDArray[Any]](), list[Mapping]()
    for each, offset in zip(arrays, starts, strict=False):
        mappings.append(_map(place.folder / each.file, each.nbytes, map_path) if each.alone else shared)
        found.append(mappings[-1].array(each.dtype, each.shape, 0 if each.alone else offset))
    return TableFiles.of(place, found, mappings)


def _opened_alone(place: Place, arrays: ArraySpecs, map_path: Map) -> TableFiles:
    """Arrays in files of their own."""
    mappings = [_map(place.folder / each.file, each.nbytes, map_path) for each in arrays]
    found = [m.array(each.dtype, each.shape) for m, each in zip(mappings, arrays, strict=True)]
    return TableFiles.of(place, found, mappings)


def _map(path: Path, size: int, map_path: Map) -> Mapping:
    """A file of one array, which has so many bytes."""
    if path.exists() and path.stat().st_size > size and not anything_after(path, size):
        os.truncate(path, size)
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise _damaged(path, found, f"{size}")
    return map_path(path)


def _map_shared(path: Path, end: int, map_path: Map) -> Mapping:
    """A file of several tables, which has so many bytes or more."""
    found = path.stat().st_size if path.exists() else None
    if found is None or found < end:
        raise _damaged(path, found, f"{end} or more")
    return map_path(path)


def _damaged(path: Path, found: int | None, expected: str) -> StorageFailed:
    has = "is missing" if found is None else f"has {found} bytes"
    return StorageFailed(f"{path} {has}, expected {expected} bytes: {RESTORE}")


def anything_after(path: Path, size: int) -> bool:
    """Whether a file has anything but zeros after so many bytes."""
    with path.open("rb") as file:
        file.seek(size)
        return any(block.count(0) < len(block) for block in iter(partial(file.read, _BLOCK_BYTES), b""))
