"""Rows into NumPy arrays."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from deltasync.client.copies import Copies
from deltasync.client.reading import Reading, Reads, number_of_copies
from deltasync.client.targets import Release
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec


@dataclass(frozen=True, kw_only=True)
class TableReading(Reading):
    """A `Reading` of tables.

    Attributes:
        tables: [rows, dim] array by table name.
    """

    tables: Mapping[str, Values]


class NumpyTarget:
    """Keeps every table as a NumPy array.

    Attributes:
        reads: as it was made.
    """

    def __init__(self, *, reads: Reads = "pause") -> None:
        """Start with no tables.

        Args:
            reads: "pause": readers wait while a release is written. "copies": every array is there twice, and
                no reader waits.

        Raises:
            InvalidInput: `reads` is something else.
        """
        self.reads = reads
        arrays = [_Arrays() for _ in range(number_of_copies(reads))]
        self._copies = Copies([(each, TableReading(tables=each.tables)) for each in arrays])

    def reading(self) -> AbstractContextManager[TableReading]:
        """The tables and their version, with no release written into them while the block runs.

        Several threads may be inside, each of them more than once. Arrays are not to be used after the block.

        Raises:
            TornTarget: a release was not written to its end.
            Contradiction: this thread is applying a release.
        """
        return self._copies.reading()

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

    @property
    def position(self) -> Position:
        """The one to go on from: of the last release, or an empty one where that was not written to its end."""
        return self._copies.position

    @property
    def event_time_unix_ns(self) -> int | None:
        """As in a `Reading`."""
        return self._copies.newest.event_time_unix_ns

    def apply(self, release: Release) -> None:
        """Write the rows of a release into the arrays; those of tables no longer followed are dropped.

        Raises:
            Contradiction: the consumer streams ids only, or this thread is inside `reading()`.
            TornTarget: a release before was not written to its end, and this one does not bring everything.
        """
        release.check_values()
        self._copies.apply(release)

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table; zeros for those that it has grown by since the last release.

        Where two copies hold different rows, it is what neither of them holds.
        """
        return self._copies.read(table, ids)


class _Arrays:
    """Every table, once."""

    def __init__(self) -> None:
        self.tables: dict[str, Values] = {}

    def stage(self, release: Release) -> Callable[[], None]:
        """See `Copy`. New arrays are filled at once, since nobody reads them yet."""
        before = dict(self.tables)  # Kept until all is written: to free them takes time, too.
        tables = {table.name: self._array(table, reset=release.resets(table)) for table in release.tables}
        fresh = {name for name, array in tables.items() if array is not before.get(name)}
        reset = [table.name for table in release.tables if release.resets(table) and table.name not in fresh]
        late = [(tables[rows.table.name], rows) for rows in release.rows if rows.table.name not in fresh]
        for rows in release.rows:
            if rows.table.name in fresh:
                tables[rows.table.name][rows.ids] = rows.values

        def write() -> None:
            for name in reset:
                tables[name].fill(0)
            for array, rows in late:
                array[rows.ids] = rows.values
            for name in before.keys() - tables.keys():
                del self.tables[name]
            self.tables.update(tables)

        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `Copy`."""
        rows = self._rows_of(table)
        if rows is None:
            return None
        found, held = np.zeros((len(ids), table.dim), table.dtype), ids[: np.searchsorted(ids, len(rows))]
        found[: len(held)] = rows[held]
        return found

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
