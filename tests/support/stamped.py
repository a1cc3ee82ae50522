"""Stamped tables in memory."""

import numpy as np

from deltasync.core.change_counts import Stamps
from deltasync.core.rows import Values
from deltasync.core.stamps import StampedTable, has_norm
from deltasync.core.tables import TableSpec


def stamped_table(spec: TableSpec, rows: Values, stamps: Stamps) -> StampedTable:
    """A table with these rows, which fit their digests."""
    digests = np.zeros((spec.rows, 1), np.uint64)
    squares = np.zeros((spec.rows if has_norm(spec) else 0, 1), np.float32)
    table = StampedTable(spec, rows, stamps, digests, squares)
    table.make_digests()
    table.make_tags()
    return table
