"""What was read last of a table that a target holds, row by row."""

from dataclasses import replace

import numpy as np

from deltasync.core.digests import RowDigests
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids, Mask
from deltasync.core.tables import TableSpec
from deltasync.core.words import counted
from deltasync.kernels.digests import exchange


class TableDigests:
    """The digest of each row of a table as a target was last seen to hold it: 8 bytes a row.

    Attributes:
        table: the table.
        checksum: of all rows.
        swept: how many rows the sweep of the table has read, from the first one on.
    """

    def __init__(self, table: TableSpec) -> None:
        """All rows are zeros."""
        self.table = table
        self.checksum = self.swept = 0
        self._digests = np.zeros(table.rows, np.uint64)
        self._damaged: Mask | None = None  # [rows]; a table that was never damaged needs none.

    def grown_to(self, table: TableSpec) -> "TableDigests | None":
        """The same of a table that may have got more rows, zeros; None if its rows come in another form."""
        more = table.rows - self.table.rows
        if more < 0 or replace(self.table, rows=table.rows) != table:
            return None
        if more:
            self.table = table
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
            self._damaged = None if self._damaged is None else np.pad(self._damaged, (0, more))
        return self

    def read(self, ids: Ids, digests: RowDigests) -> None:
        """Rows `ids` [n] were read, and had these digests [n]: as damage they are not known.

        Raises:
            Contradiction: the table has no such rows.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.table.rows:
            sent = f"rows {ids.min()} to {ids.max()}"
            raise Contradiction(
                f"table {self.table.name!r} has {counted(self.table.rows, 'row')}, and was sent {sent}"
            )
        change = exchange(self._digests, ids, digests)
        self.checksum = (self.checksum + int(change)) % 2**64

    def read_back(self, ids: Ids, digests: RowDigests, received: RowDigests) -> None:
        """The same of rows that have just been written; `received` [n] are their digests as they came."""
        self.read(ids, digests)
        damaged: Mask = digests != received
        if self._damaged is not None or damaged.any():
            self._marks()[ids] = damaged
            self._forget_marks()

    def read_again(self, ids: Ids, digests: RowDigests) -> None:
        """The same of rows that nothing should have changed since they were read."""
        damaged = ids[digests != self._digests[ids]]
        if len(damaged):
            self.read(ids, digests)
            self._marks()[damaged] = True

    @property
    def damaged(self) -> Ids:
        """Numbers of the rows that were found to be others than had been sent, int64 [n], ascending."""
        return np.empty(0, np.int64) if self._damaged is None else np.flatnonzero(self._damaged)

    def _forget_marks(self) -> None:
        if self._damaged is not None and not self._damaged.any():
            self._damaged = None

    def _marks(self) -> Mask:
        if self._damaged is None:
            self._damaged = np.zeros(self.table.rows, np.bool_)
        return self._damaged
