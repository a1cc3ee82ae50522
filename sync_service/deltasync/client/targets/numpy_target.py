"""The target for NumPy arrays, and writing rows into memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction
from deltasync.client.targets.local import LocalTarget, Side
from deltasync.client.targets.target import Reading, Reads, Release, Written, number_of_copies
from deltasync.core.digests import RowDigests, row_digests, weights
from deltasync.core.rows import BLOCK_ROWS, Ids, Values
from deltasync.core.tables import TableSpec
from deltasync.kernels.rows import gather, put

Bytes = NDArray[np.uint8]
_NO_WEIGHTS = np.empty(0, np.uint64)


class NumpyTarget(LocalTarget["_Arrays", "TableReading"]):
    """Keeps every table as a NumPy array. Drops tables that the consumer no longer follows."""

    def __init__(self, *, reads: Reads = "pause") -> None:
        """Start with no tables.

        Args:
            reads: "pause": readers wait while a release is written. "copies": no reader waits, but every array
                exists twice.

        Raises:
            InvalidInput: `reads` is not "pause" or "copies".
        """
        arrays = [_Arrays() for _ in range(number_of_copies(reads))]
        super().__init__(reads, [Side(each, TableReading(tables=each.tables)) for each in arrays])

    def apply(self, release: Release) -> Written | None:
        """Write a release: see `LocalTarget.apply`. Rows for a quantised module are a Contradiction."""
        release.check_numbers()
        return super().apply(release)

    @property
    def tables(self) -> dict[str, Values]:
        """[rows, dim] array by table name. Outside of `reading()` a release may be changing them.

        To continue with rows of an earlier process, set this before you start a subscriber.
        """
        return self._copies[0].tables

    @tables.setter
    def tables(self, tables: dict[str, Values]) -> None:
        served, *others = self._copies
        served.tables.update(tables)
        for other in others:
            other.tables.update({name: rows.copy() for name, rows in tables.items()})


@dataclass(frozen=True, kw_only=True)
class TableReading(Reading):
    """A `Reading` of `tables`: an array [rows, dim] by table name."""

    tables: Mapping[str, Values]


class _Arrays:
    """One array for every table."""

    def __init__(self) -> None:
        self.tables: dict[str, Values] = {}

    def stage(self, release: Release) -> Callable[[], Written]:
        """See `Copy`. New arrays are filled at once, since they have no readers yet."""
        before = dict(self.tables)  # Freed after the write, because freeing takes time, too.
        tables = {table.name: self._array(table, reset=release.resets(table)) for table in release.tables}
        fresh = {name for name, array in tables.items() if array is not before.get(name)}
        puts = [
            staged_rows(tables[rows.table.name], rows.ids, rows.values, digested=True) for rows in release.rows
        ]
        early = [
            put_rows() if rows.table.name in fresh else None
            for rows, put_rows in zip(release.rows, puts, strict=True)
        ]

        def write() -> Written:
            for table in release.tables:
                if release.resets(table) and table.name not in fresh:
                    tables[table.name].fill(0)
            written = Written(
                [put_rows() if digests is None else digests for digests, put_rows in zip(early, puts, strict=True)]
            )
            for name in before.keys() - tables.keys():
                del self.tables[name]
            self.tables.update(tables)
            return written

        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `Copy`."""
        rows = self._rows_of(table)
        return None if rows is None else rows_at(rows, ids)

    def _rows_of(self, table: TableSpec) -> Values | None:
        """The current rows of a table, unless its rows now have another form."""
        rows = self.tables.get(table.name)
        return rows if rows is not None and (rows.shape[1], rows.dtype) == (table.dim, table.dtype) else None

    def _array(self, table: TableSpec, *, reset: bool) -> Values:
        """The array for a table: the current one, or a new one with the rows that it keeps."""
        current = self._rows_of(table)
        if current is not None and (len(current) == table.rows if reset else len(current) >= table.rows):
            return current
        array = np.zeros((table.rows, table.dim), table.dtype)
        if current is not None and not reset:
            array[: len(current)] = current
        return array


def staged_rows(
    array: Values, ids: Ids, values: Values, *, digested: bool = False
) -> Callable[[], RowDigests | None]:
    """Prepare to write `values` ([n, D]) to the rows `ids` ([n]) of an array [N, D] of their type.

    Returns a function that writes them. With `digested` it returns the digests of the rows in the array
    afterwards.
    """
    check_fit(len(array), array.shape[1] * array.itemsize, ids, values)
    memory = _memory_of(array)
    if memory is None or not array.flags.writeable or not array.flags.aligned:

        def write_by_numpy() -> RowDigests | None:
            array[ids] = values
            return row_digests(array[ids]) if digested else None

        return write_by_numpy
    words = memory.view(f"<u{min(array.itemsize, 4)}")
    factors = weights(0, values.shape[1] * array.itemsize // words.itemsize) if digested else _NO_WEIGHTS
    put.compile()  # Now, so that no reader waits for the compiler.
    numbers, digests = _numbers(ids), np.empty(len(ids), np.uint64)
    # The zeros of deleted rows are a broadcast view: copy them block by block.
    rows = max(1, len(ids)) if values.flags.c_contiguous else BLOCK_ROWS

    def write() -> RowDigests | None:
        for start in range(0, len(ids), rows):
            some = slice(start, start + rows)
            source = np.ascontiguousarray(values[some]).view(np.uint8)
            put(memory, words, numbers[some], source, factors, digests[some])
        return digests if digested else None

    return write


def check_fit(rows: int, row_bytes: int, ids: Ids, values: Values) -> None:
    """A Contradiction unless `values` ([n, D]) fit rows `ids` ([n]) of memory with `rows` rows of `row_bytes`."""
    size = values.shape[1] * values.itemsize
    if size != row_bytes or not _within(rows, ids):
        ids_text = f"ids {ids.min()} to {ids.max()}" if len(ids) else "no ids"
        raise Contradiction(
            f"{ids_text} of {size} bytes a row, for memory of {rows} rows of {row_bytes} bytes: not written"
        )


def rows_at(array: Values, ids: Ids) -> Values:
    """A copy of the rows `ids` ([n]) of an array [N, D]: [n, D], zeros past the array's end."""
    values, memory = np.empty((len(ids), array.shape[1]), array.dtype), _memory_of(array)
    if memory is not None and _within(len(array), ids):
        gather(memory, _numbers(ids), values.view(np.uint8))
        return values
    there = ids < len(array)
    values[there], values[~there] = array[ids[there]], 0
    return values


def _memory_of(array: Values) -> Bytes | None:
    """The bytes of rows with their padding, [N, stride]; None if a row is not contiguous."""
    apart, step = array.strides
    if step != array.itemsize or apart < array.shape[1] * step:
        return None
    # The last row may have no padding. No code reads the padding.
    memory: Bytes = np.lib.stride_tricks.as_strided(array[:, :1].view(np.uint8), (len(array), apart), (apart, 1))
    return memory


def _within(rows: int, ids: Ids) -> bool:
    return not len(ids) or bool(0 <= ids.min() <= ids.max() < rows)


def _numbers(ids: Ids) -> Ids:
    return np.ascontiguousarray(ids, np.int64)
