"""Stamped tables with given rows."""

import numpy as np

from deltasync.core.changes import Stamps
from deltasync.core.digests import row_digests
from deltasync.core.rows import Values
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import TableSpec


def stamped_table(spec: TableSpec, rows: Values, stamps: Stamps) -> StampedTable:
    """A table with these rows and stamps, as after loading a checkpoint."""
    table = StampedTable(spec)
    live, deleted = np.flatnonzero(stamps > 0), np.flatnonzero(stamps < 0)
    table.load(live, stamps[live], row_digests(rows[live]), rows[live])
    table.load(deleted, stamps[deleted], np.zeros(len(deleted), np.uint64), None)
    table.recount()
    return table
