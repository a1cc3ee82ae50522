"""A slow look at all rows of some tables, whoever asks for them: damage is found where nothing changes, too."""

from collections.abc import Sequence

import numpy as np

from deltasync.core.stamps import StampedTable

# Of rows, at a time: a few milliseconds.
_BYTES = 8 << 20


class Sweep:
    """How far it has come. On the thread that changes the tables."""

    def __init__(self) -> None:
        self._table = self._row = 0

    def go_on(self, tables: Sequence[StampedTable]) -> None:
        """Look at some more rows.

        Raises:
            DamagedRows: some do not fit their digests.
        """
        left = _BYTES
        for _ in tables:
            table = tables[self._table % len(tables)]
            first, last = self._row, min(table.spec.rows, self._row + 1 + left // table.spec.row_bytes)
            left -= (last - first) * table.spec.row_bytes
            self._row = last
            if last == table.spec.rows:
                self._table, self._row = (self._table + 1) % len(tables), 0
            ids = first + np.flatnonzero(table.stamps[first:last])
            table.check(ids, table.rows_of(ids))
            if left <= 0:
                break
