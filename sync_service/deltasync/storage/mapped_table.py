"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltasync.core.digests import RowDigests, Squares
from deltasync.core.rows import Ids
from deltasync.core.stamps import StampedTable, has_norm
from deltasync.core.tables import TableSpec
from deltasync.storage.table_files import ArraySpec, TableFiles, flush

# The arrays from here on are by segment.
_FIRST_BY_SEGMENT = 3


@dataclass(frozen=True)
class TableLayout:
    """What arrays a table has.

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

    def arrays(self, folder: str = "") -> list[ArraySpec]:
        """Rows, stamps, tags, digests, and squares if they are kept; their files' folder is below the table's."""
        rows, dim, segments = self.spec.rows, self.spec.dim, len(self.columns) - 1
        arrays = [
            ArraySpec(folder + file_of(self.spec, "rows"), self.spec.dtype, (rows, dim)),
            ArraySpec(folder + file_of(self.spec, "stamps"), np.dtype(np.int64), (rows,)),
            ArraySpec(folder + file_of(self.spec, "tags"), np.dtype(np.uint16), (rows,)),
            self._by_segment(folder, "digests", np.dtype(np.uint64), (rows, segments)),
        ]
        if self.normed:
            arrays.append(self._by_segment(folder, "squares", np.dtype(np.float32), (rows, segments)))
        return arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.arrays())

    def _by_segment(self, folder: str, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArraySpec:
        """An array whose shape changes with the segments: if there are several, it is alone."""
        if inner := self.columns[1:-1]:
            kind = f"{xxhash.xxh3_64_hexdigest(repr(inner).encode())}.{kind}"
        return ArraySpec(folder + file_of(self.spec, kind), dtype, shape, alone=bool(inner))


@dataclass(frozen=True, eq=False)
class MappedArrays:
    """The arrays of a table, in the order of the bits of `StampedTable.wrote`, and where they are."""

    layout: TableLayout
    files: TableFiles

    def plain(self) -> list[NDArray[Any]]:
        """Rows, stamps, tags, digests and squares as `StampedTable` has them."""
        none = np.empty((0, len(self.layout.columns) - 1), np.float32)
        return [*self.files.arrays, *([] if self.layout.normed else [none])]

    def lengthen(self, rows: int) -> None:
        """Make files of its own as long as they are to be once there are so many rows.

        Raises:
            StorageFailed: there is no room; the files are as they were, or longer.
        """
        if rows > self.layout.spec.rows and self.files.place.offset is None:
            self.files.lengthen(replace(self.layout, spec=replace(self.layout.spec, rows=rows)).arrays())


class MappedTable(StampedTable):
    """A stamped table whose arrays are mapped from files.

    Attributes:
        mapped: the arrays, as they may be flushed. Replaced whole: any thread may read it.
    """

    def __init__(self, layout: TableLayout, files: TableFiles, removed_before: int = 0) -> None:
        self.removed_before = removed_before
        self.mapped = MappedArrays(layout, files)
        self._split: MappedArrays | None = None  # To be filled.
        self._written = files  # What the table's arrays are in; they are not flushed before they are `mapped`.
        self._stale = list[ArraySpec]()
        rows, stamps, tags, digests, squares = self.mapped.plain()
        super().__init__(layout.spec, rows, stamps, digests, squares, layout.columns, tags)

    def layout_as(self, spec: TableSpec) -> TableLayout:
        """Its layout, if it is to be something else."""
        return replace(self.mapped.layout, spec=spec)

    def moves(self, spec: TableSpec) -> bool:
        """Whether it needs other files to be something else."""
        return spec.rows > self.spec.rows and self.mapped.files.place.offset is not None

    def extend(self, layout: TableLayout, files: TableFiles | None = None) -> Callable[[], None]:
        """Make room for what the table is to be, which may have more rows: in its own files, or else in `files`,
        which are all zero. Blocks; any thread.

        Returns:
            What makes the table that, with zeros in new rows: for the thread that changes it. If it was split
            meanwhile, that may raise StorageFailed, too.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        return partial(self._become, MappedArrays(layout, files) if files else self._extended(layout.spec))

    def _extended(self, spec: TableSpec) -> MappedArrays:
        """Its own files, with room for what it is to be."""
        while True:
            before = self.mapped
            layout = replace(before.layout, spec=spec)
            if spec.rows == self.spec.rows:
                return MappedArrays(layout, before.files)
            try:
                return MappedArrays(layout, before.files.extended(layout.arrays()))
            except FileNotFoundError:
                if self.mapped is before:  # Otherwise they are of before a split, and a flush has removed them.
                    raise

    def _become(self, mapped: MappedArrays) -> None:
        if mapped.layout.columns != self.columns:  # It was split meanwhile.
            mapped = self._split_room(mapped)
        mapped.files.begin_with(self.mapped.files, len(mapped.files.arrays))
        self.counts = self.counts.plus_unchanged(mapped.layout.spec.rows - self.spec.rows)
        self.spec = mapped.layout.spec
        self.rows, self.stamps, self.tags, self.digests, self.squares = mapped.plain()
        self.index.extend(self.stamps)
        self._written, self.mapped = mapped.files, mapped

    def _split_room(self, mapped: MappedArrays) -> MappedArrays:
        """Room for the segments that there are now, in the place of room that was made for others."""
        if mapped.files.place == self.mapped.files.place:
            return self._extended(mapped.layout.spec)
        layout = replace(mapped.layout, columns=self.columns)
        return MappedArrays(layout, mapped.files.with_others(layout.arrays(), start=_FIRST_BY_SEGMENT))

    def split(self, *edges: int) -> None:
        """See `StampedTable.split`."""
        before = self.mapped
        try:
            super().split(*edges)
            if self._split:  # Now: what is flushed before is what there was.
                self._split.files.begin_with(before.files, _FIRST_BY_SEGMENT)
                self.mapped = self._split
                self._stale += before.layout.arrays()[_FIRST_BY_SEGMENT:]
        finally:
            self._split, self._written = None, self.mapped.files

    def _room_of(self, columns: tuple[int, ...]) -> tuple[RowDigests, Squares]:
        """Files of other segments. Those of before stay as long as the log may name them."""
        before = self.mapped
        layout = replace(before.layout, columns=columns)
        self._split = MappedArrays(layout, before.files.with_others(layout.arrays(), start=_FIRST_BY_SEGMENT))
        self._written = self._split.files
        *_, digests, squares = self._split.plain()
        return digests, squares

    def wrote(self, ids: Ids | None, arrays: int) -> None:
        """See `StampedTable.wrote`."""
        self._written.touch(ids, arrays)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        flush([self.mapped.files])

    def remove_stale(self, named: MappedArrays) -> None:
        """Remove the files of segments that there were before those of `named`, which the log names, unless there
        are others by now. Any thread.
        """
        stale = list(self._stale)  # First: what is replaced later is not among them.
        if self.mapped is not named:
            return
        files = {each.file for each in named.layout.arrays()}
        for each in stale:
            if each.file not in files:  # Room may have been made before a split, and be used after it.
                named.files.remove(each)
            self._stale.remove(each)


def file_of(table: TableSpec, kind: str) -> str:
    """The file of one of a table's arrays; its name is unique and short, however long the table's name is."""
    return f"{quote(table.name, safe='')[:100]}-{xxhash.xxh3_64_hexdigest(table.name.encode())}.{kind}"
