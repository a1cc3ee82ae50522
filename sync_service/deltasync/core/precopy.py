"""Copy many rows of changing tables, and end with a small rest at one moment.

This is the pre-copy of live migration. Rows are copied in blocks with their present values. Rows that change
meanwhile are copied again in the next round, and so on, until the rest is small. Only that rest is copied between
two changes. A receiver that applies everything in order then holds the tables as of that moment.
"""

from collections.abc import Sequence

import numpy as np

from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable

# If a round leaves more than this share of its rows, rows change about as fast as they are copied, and another
# round would not help.
_SHRINKS_TO = 0.75
# Stamps are searched in windows of at least this many rows, which costs less than a call for each block's rows.
_WINDOW_ROWS = 1 << 16


class PreCopy:
    """Copies the rows stamped after a number, in blocks while they change, then the rest at one moment.

    Used on the thread that changes the tables. The caller must read the rows of a block before anything else runs
    there, and must not request the rest while a table has an unfinished number.

    Attributes:
        limit: maximum size of the rest in bytes.
    """

    def __init__(self, tables: Sequence[StampedTable], after: Sequence[int], limit: int) -> None:
        """Copy the rows of each table with a stamp above its number in `after`."""
        self.limit = limit
        self._walks = [_Walk(table, number) for table, number in zip(tables, after, strict=True)]
        self._slot = 0
        self._copied = self._look_at = 0
        self._round_bytes = self.left_bytes

    @property
    def left_bytes(self) -> int:
        """Upper bound of the size of ids and values that are left, in bytes."""
        return sum(walk.left_rows * walk.table.spec.row_bytes for walk in self._walks)

    def next_block(self, nbytes: int) -> tuple[int, Ids] | None:
        """The next rows to read, about `nbytes` or less, including deleted ones: the index of their table, and ids
        ([n], ascending). None once the rest is at most `limit` bytes, or if a round left nearly as many rows as
        it began with. A further call then starts another round.
        """
        while True:
            # The rest shrinks by no more than the copied rows, so it need not be counted for each block.
            if self._copied >= self._look_at:
                left = self.left_bytes
                if left <= self.limit:
                    return None
                self._look_at = self._copied + max(left - self.limit, nbytes)
            if self._slot == len(self._walks):
                if not self._begin_round():
                    return None
                continue
            walk = self._walks[self._slot]
            ids = walk.take(nbytes)
            if len(ids):
                self._copied += len(ids) * walk.table.spec.row_bytes
                return self._slot, ids
            self._slot += 1

    def rest(self) -> list[tuple[int, Ids]]:
        """All remaining rows, including deleted ones: indices of tables, and ids ([n], ascending)."""
        left = ((slot, walk.rest()) for slot, walk in enumerate(self._walks))
        return [(slot, ids) for slot, ids in left if len(ids)]

    def _begin_round(self) -> bool:
        """Begin the next round. Return whether the last one left clearly fewer rows than it began with."""
        for walk in self._walks:
            walk.position, walk.since, walk.copied = 0, walk.began, 0
        before, self._round_bytes = self._round_bytes, self.left_bytes
        self._slot, self._look_at = 0, self._copied
        return self._round_bytes <= max(self.limit, before * _SHRINKS_TO)


class _Walk:
    """The progress of a round in one table, from slot 0."""

    def __init__(self, table: StampedTable, after: int) -> None:
        self.table = table
        # Rows before slot `position` were copied as of number `began` or later, the others as of `since`.
        self.position, self.began, self.since = 0, after, after
        self.copied = 0

    @property
    def left_rows(self) -> int:
        """Upper bound of the rows that are left."""
        counts = self.table.counts
        again = counts.after(self.began) if self.position else 0
        if self.position >= self.table.slots:
            return again
        return min(counts.rows, max(0, counts.after(self.since) - self.copied) + again)

    def take(self, nbytes: int) -> Ids:
        """The next rows of the round ([n], ascending); none at its end."""
        table, most = self.table, max(1, nbytes // self.table.spec.row_bytes)
        if not self.position:
            # More rows of an unfinished number may follow behind this walk.
            self.began = table.unfinished - 1 if table.unfinished else table.counts.newest
        windows, count = [np.zeros(0, np.int64)], 0
        while count < most and self.position < table.slots:
            last = min(table.slots, self.position + max(most, _WINDOW_ROWS))
            slots = table.index.changed_in(self.position, last, self.since)
            self.position = last
            if count + len(slots) > most:
                slots = slots[: most - count]
                self.position = int(slots[-1]) + 1
            windows.append(slots)
            count += len(slots)
        self.copied += count
        return table.ids_of(np.concatenate(windows))

    def rest(self) -> Ids:
        """The remaining rows ([n], ascending)."""
        if not self.position:  # The index has the ids of the newest changes, without reading stamps.
            return self.table.changed_since(self.since)
        table, position = self.table, self.position
        again = table.index.changed_in(0, position, self.began)
        return table.ids_of(np.concatenate([again, table.index.changed_in(position, table.slots, self.since)]))
