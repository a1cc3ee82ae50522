"""Rows in NumPy arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction
from deltasync.client.targets.local import LocalTarget
from deltasync.client.targets.target import Reading, Reads, Release, number_of_copies
from deltasync.core.rows import BLOCK_ROWS, Ids, Values
from deltasync.core.tables import TableSpec
from deltasync.kernels.rows import gather, scatter

Bytes = NDArray[np.uint8]


def check_fit(rows: int, row_bytes: int, ids: Ids, values: Values) -> None:
    """Check that memory of so many rows of so many bytes can take `values` ([n, D]) as its rows `ids` ([n]).

    Raises:
        Contradiction: it has no such rows, or wider or narrower ones.
    """
    given = values.shape[1] * values.itemsize
    if given != row_bytes or not _within(rows, ids):
        ids_text = f"ids {ids.min()} to {ids.max()}" if len(ids) else "no ids"
        raise Contradiction(
            f"{ids_text} of {given} bytes a row, for memory of {rows} rows of {row_bytes} bytes: not written"
        )


def staged_rows(held: Values, ids: Ids, values: Values) -> Callable[[], None]:
    """What writes `values` ([n, D]) to the rows `ids` ([n]) of an array [N, D] of their type, and no more.

    Raises:
        Contradiction: they do not fit.
    """
    check_fit(len(held), held.shape[1] * held.itemsize, ids, values)
    memory = _memory_of(held)
    if memory is None or not held.flags.writeable:
        return lambda: held.__setitem__(ids, values)
    scatter.compile()  # Not in front of readers that wait.
    if not values.flags.c_contiguous:
        return lambda: _put_blocks(memory, ids, values)
    numbers, rows = _numbers(ids), values.view(np.uint8)
    return lambda: scatter(memory, 0, numbers, rows)


def _put_blocks(memory: Bytes, ids: Ids, values: Values) -> None:
    """Of zeros that take no memory only a block is made."""
    for start in range(0, len(ids), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        scatter(memory, 0, _numbers(ids[block]), np.ascontiguousarray(values[block]).view(np.uint8))


def rows_at(held: Values, ids: Ids) -> Values:
    """A copy of the rows `ids` ([n]) of an array [N, D]: [n, D], zeros where they are past its end."""
    values, memory = np.empty((len(ids), held.shape[1]), held.dtype), _memory_of(held)
    if memory is not None and _within(len(held), ids):
        gather(memory, _numbers(ids), values.view(np.uint8))
        return values
    there = ids < len(held)
    values[there], values[~there] = held[ids[there]], 0
    return values


def _within(rows: int, ids: Ids) -> bool:
    return not len(ids) or bool(0 <= ids.min() <= ids.max() < rows)


def _numbers(ids: Ids) -> Ids:
    return np.ascontiguousarray(ids, np.int64)


def _memory_of(held: Values) -> Bytes | None:
    """The bytes of rows and of what they are padded with, [N, from one row to the next]; None where a row does not
    lie in one piece.
    """
    apart, step = held.strides
    if step != held.itemsize or apart < held.shape[1] * step:
        return None
    # Behind the last row there may be no padding; nothing reads that of any row.
    memory: Bytes = np.lib.stride_tricks.as_strided(held[:, :1].view(np.uint8), (len(held), apart), (apart, 1))
    return memory


@dataclass(frozen=True, kw_only=True)
class TableReading(Reading):
    """A `Reading` of tables.

    Attributes:
        tables: [rows, dim] array by table name.
    """

    tables: Mapping[str, Values]


class NumpyTarget(LocalTarget["_Arrays", TableReading]):
    """Keeps every table as a NumPy array; those that are no longer followed are dropped."""

    def __init__(self, *, reads: Reads = "pause") -> None:
        """Start with no tables.

        Args:
            reads: "pause": readers wait while a release is written. "copies": every array is there twice, and
                no reader waits.

        Raises:
            InvalidInput: `reads` is something else.
        """
        arrays = [_Arrays() for _ in range(number_of_copies(reads))]
        super().__init__(reads, [(each, TableReading(tables=each.tables)) for each in arrays])

    @property
    def tables(self) -> dict[str, Values]:
        """[rows, dim] array by table name; outside of `reading()` a release may be writing them.

        Set it before a subscriber starts where rows have outlived the process.
        """
        return self._copies.served.tables

    @tables.setter
    def tables(self, tables: dict[str, Values]) -> None:
        served, *others = self._copies.each
        served.tables.update(tables)
        for other in others:
            other.tables.update({name: rows.copy() for name, rows in tables.items()})


class _Arrays:
    """Every table, once."""

    def __init__(self) -> None:
        self.tables: dict[str, Values] = {}

    def stage(self, release: Release) -> Callable[[], None]:
        """See `Copy`. New arrays are filled at once, since nobody reads them yet.

        Raises:
            Contradiction: a table has no such rows; nothing was written.
        """
        before = dict(self.tables)  # Kept until all is written: to free them takes time, too.
        tables = {table.name: self._array(table, reset=release.resets(table)) for table in release.tables}
        fresh = {name for name, array in tables.items() if array is not before.get(name)}
        reset = [table.name for table in release.tables if release.resets(table) and table.name not in fresh]
        late = list[Callable[[], None]]()
        for rows in release.rows:
            put = staged_rows(tables[rows.table.name], rows.ids, rows.values)
            if rows.table.name in fresh:
                put()
            else:
                late.append(put)

        def write() -> None:
            for name in reset:
                tables[name].fill(0)
            for put in late:
                put()
            for name in before.keys() - tables.keys():
                del self.tables[name]
            self.tables.update(tables)

        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `Copy`."""
        rows = self._rows_of(table)
        return None if rows is None else rows_at(rows, ids)

    def _rows_of(self, table: TableSpec) -> Values | None:
        """What is held of a table, if it is held in that form: a policy may have come to send another."""
        rows = self.tables.get(table.name)
        return rows if rows is not None and (rows.shape[1], rows.dtype) == (table.dim, table.dtype) else None

    def _array(self, table: TableSpec, *, reset: bool) -> Values:
        """The array that is to hold a table: the one that does, or another one, with what stays of it."""
        held = self._rows_of(table)
        if held is not None and (len(held) == table.rows if reset else len(held) >= table.rows):
            return held
        array = np.zeros((table.rows, table.dim), table.dtype)
        if held is not None and not reset:
            array[: len(held)] = held
        return array
