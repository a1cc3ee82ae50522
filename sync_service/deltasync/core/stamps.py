"""Rows with a stamp on every row: the one idea every hop is built on.

"What does X still lack?" is `rows whose stamp > X's version`, always answered with sorted unique ids
and their current values. Of a row that was deleted, the stamp is the negative of the number.
"""

import math

import numpy as np

from deltasync.core.change_counts import ChangeCounts, Stamps
from deltasync.core.change_index import ChangeIndex
from deltasync.core.digests import BLOCK_ROWS, Digest, digest
from deltasync.core.rows import Ids, Mask, RowBatch, Values
from deltasync.core.tables import TableSpec

# Stamps are scanned in blocks so that a scan's scratch memory stays in the processor's cache.
_SCAN_ROWS = 1 << 20
# Once a sum has shrunk to this share of what it was, rounding has eaten the rest of it.
_EXACT_SHARE = 2.0**-30


def _contiguous(ids: Ids) -> slice | None:
    """The slice that strictly ascending `ids` cover, if they leave no gap."""
    if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None


class StampedTable:
    """The rows of one table and the version at which each last changed.

    Attributes:
        spec: what the table is.
        rows: [N, D] values, in the table's dtype.
        stamps: [N] int64, 0 = never changed, negative = deleted then. Written by this class only.
        counts: of the stamps; any thread may read them.
        index: finds the rows that are stamped after a number.
        digest: of all rows, as replicas hold them.
    """

    def __init__(self, spec: TableSpec, rows: Values, stamps: Stamps) -> None:
        self.spec = spec
        self.rows = rows
        self.stamps = stamps
        self.counts = ChangeCounts.of(stamps)
        self.index = ChangeIndex(stamps)
        self.digest = Digest()
        self._largest_sum = 0.0

    @classmethod
    def zeros(cls, spec: TableSpec) -> "StampedTable":
        """A table in memory that has never changed."""
        return cls(spec, np.zeros((spec.rows, spec.dim), spec.dtype), np.zeros(spec.rows, np.int64))

    def apply(self, rows: RowBatch, number: int) -> None:
        """Overwrite some rows, in the columns of their shard, and stamp them with `number`; or delete them."""
        for block in rows.blocks(BLOCK_ROWS):
            self._apply_block(block, number)
        self._largest_sum = max(self._largest_sum, self.digest.square_sum)
        if self.spec.kind.trained and self.digest.square_sum < self._largest_sum * _EXACT_SHARE:
            self.count_digest()

    def _apply_block(self, block: RowBatch, number: int) -> None:
        ids, first = block.ids, block.shard.col_offset
        where: slice | Ids = _contiguous(ids) or ids
        columns = slice(first, first + block.shard.cols)
        before = self.digest_of(ids, self.rows[where, columns], first)
        after = self.digest_of(ids, block.values, first)
        counts = self.counts.moved(self.stamps[where], number)
        gone = self._empty(where, columns) if block.deleted else False
        # What needs much memory comes before: a block that fails is tried again, and must not be half done.
        # The stamp first: if the process dies between the two, a row with a new stamp is sent again, while one
        # with an old stamp would be taken for the old row.
        self.index.note(ids, number)
        self.stamps[where] = np.where(gone, -number, number) if block.deleted else number
        self.rows[where, columns] = block.values
        self.counts = counts
        self.digest += after - before

    def _empty(self, where: slice | Ids, columns: slice) -> Mask:
        """Which rows hold nothing outside of some columns: where others hold some of a row, it is still there."""
        bits = self.rows.view(f"u{self.rows.itemsize}")
        others = bits[where, : columns.start], bits[where, columns.stop :]
        filled: list[Mask] = [np.any(some, axis=1) for some in others]
        return ~(filled[0] | filled[1])

    def restamp(self, ids: Ids, stamps: Stamps) -> None:
        """Give the rows `ids` ([n], strictly ascending) these stamps ([n]) instead of their own."""
        self.index.note_each(ids, stamps)
        self.counts = self.counts.without(self.stamps[ids]).plus(stamps)
        self.stamps[ids] = stamps

    def numbers(self, ids: Ids) -> Stamps:
        """When the rows `ids` ([n]) last changed, or were deleted: [n], 0 = never."""
        numbers: Stamps = np.abs(self.stamps[ids])
        return numbers

    def deleted(self, ids: Ids) -> Mask:
        """Which of the rows `ids` ([n]) were deleted, and have not come back: [n]."""
        mask: Mask = self.stamps[ids] < 0
        return mask

    def digest_of(self, ids: Ids, rows: Values, col_offset: int = 0) -> Digest:
        """The digest of what a replica holds that has applied `rows` ([n, cols], as stored)."""
        return digest(ids, rows, col_offset)

    @property
    def norm(self) -> float:
        """The L2 norm of all rows together; 0 for what is not trained."""
        return 0.0 if not self.spec.kind.trained else math.sqrt(max(0.0, self.digest.square_sum))

    def count_digest(self) -> None:
        """Find the digest anew, of all rows that ever changed: after a restart."""
        ids = self.changed_since(0)
        self.digest, self._largest_sum = Digest(), 0.0
        for start in range(0, len(ids), BLOCK_ROWS):
            block = ids[start : start + BLOCK_ROWS]
            self.digest += self.digest_of(block, self.rows_of(block))

    def rows_of(self, ids: Ids) -> Values:
        """The current rows `ids` ([n], strictly ascending): a view where they leave no gap, otherwise a copy."""
        run = _contiguous(ids)
        return self.rows[run] if run is not None else np.take(self.rows, ids, axis=0)

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, deleted ones among them."""
        return self.index.changed_since(number)

    def not_stamped(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows that are there, and have another stamp than `number`."""
        starts = range(0, len(self.stamps), _SCAN_ROWS)
        blocks = ((start, self.stamps[start : start + _SCAN_ROWS]) for start in starts)
        return np.concatenate(
            [np.flatnonzero((stamps > 0) & (stamps != number)) + start for start, stamps in blocks]
        )

    def read(self, ids: Ids, out: Values) -> RowBatch:
        """The rows `ids` ([n], strictly ascending) as they are now, their values copied into `out` ([n, D])."""
        run = _contiguous(ids)
        if run is not None:
            out[:] = self.rows[run]
        else:
            # mode="clip" lets take() write into `out` without a buffer; no id is out of range here.
            np.take(self.rows, ids, axis=0, out=out, mode="clip")
        return RowBatch.of_table(self.spec, ids, out)
