"""Rows into NumPy arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from deltasync.client.local_target import LocalTarget
from deltasync.client.reading import Reading, Reads, number_of_copies
from deltasync.client.row_memory import rows_at, staged_rows
from deltasync.client.targets import Release
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec


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
