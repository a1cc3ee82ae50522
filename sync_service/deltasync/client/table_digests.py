"""What was read last of a table that a target holds, row by row."""

from dataclasses import replace

import numpy as np

from deltasync.core.digests import RowDigests
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids
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

    def grown_to(self, table: TableSpec) -> "TableDigests | None":
        """The same of a table that may have got more rows, zeros; None if its rows come in another form."""
        more = table.rows - self.table.rows
        if more < 0 or replace(self.table, rows=table.rows) != table:
            return None
        if more:
            self.table = table
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
        return self

    def read(self, ids: Ids, digests: RowDigests) -> None:
        """Rows `ids` [n], each once, were read, and had these digests [n].

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
