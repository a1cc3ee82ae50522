"""A slow look at all rows of some tables, whoever asks for them: damage is found where nothing changes, too."""

from collections.abc import Sequence

import numpy as np

from deltasync.core.digests import squared_norms
from deltasync.core.rows import Ids, Values
from deltasync.core.stamps import StampedTable

# Of rows, at a time: a few milliseconds.
_BYTES = 8 << 20
# What a look at a table takes in any case is as much as that of so many bytes.
_TABLE_BYTES = 256 << 10


class Sweep:
    """How far it has come. On the thread that changes the tables."""

    def __init__(self) -> None:
        self._table = self._row = 0
        self._sound: StampedTable | None = None  # The table, if nothing was found from its first row on.

    def go_on(self, tables: Sequence[StampedTable], number: int) -> None:
        """Look at some more rows, while `number` is the newest.

        Raises:
            DamagedRows: some do not fit their digests.
        """
        left = _BYTES
        for _ in tables:
            table = tables[self._table % len(tables)]
            first, last = self._row, min(table.spec.rows, self._row + 1 + left // table.spec.row_bytes)
            left -= max((last - first) * table.spec.row_bytes, _TABLE_BYTES)
            self._row = last
            try:
                table.retag(table.untagged(first, last), number)
                self._look(table, first, last)
            finally:
                if last == table.spec.rows:
                    self._table, self._row = (self._table + 1) % len(tables), 0
            if left <= 0:
                break

    def _look(self, table: StampedTable, first: int, last: int) -> None:
        before = self._sound if first else table
        self._sound = None
        ids = first + np.flatnonzero(table.stamps[first:last])
        rows = table.rows_of(ids)
        table.check(ids, rows)
        table.square(_wrongly_squared(table, ids, rows))
        self._sound = before
        if before is table and last == table.spec.rows:
            table.count()  # A digest may have been damaged, and been counted, before its row was overwritten.


def _wrongly_squared(table: StampedTable, ids: Ids, rows: Values) -> Ids:
    """Those of the rows `ids` [n], which are `rows` [n, D], whose squared norms are others, beyond rounding."""
    if not len(table.squares):
        return ids[:0]
    kept = table.squares[ids].sum(axis=1, dtype=np.float64)
    wrong: Ids = ids[~np.isclose(kept, squared_norms(rows), rtol=1e-3, atol=1e-30, equal_nan=True)]
    return wrong
