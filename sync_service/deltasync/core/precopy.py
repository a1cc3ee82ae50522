"""Copy many rows of tables that go on changing, and end with a small rest at one moment.

This is the pre-copy of live migration. Rows are copied block by block as they are at that moment. Rows that change
meanwhile are copied again in the next round, and so on, until what is left is small. Only that rest is copied
between two changes. A receiver that applies everything in order holds the tables as they are at that moment.
"""

from collections.abc import Sequence

import numpy as np

from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable

# After a round that leaves more than this share of what it began with, rows change about as fast as they are
# copied: another round would not help.
_SHRINKS_TO = 0.75
# Stamps are searched in windows of at least this many rows, which costs less than a call for each block's rows.
_WINDOW_ROWS = 1 << 16


class PreCopy:
    """The rows stamped after a number, in blocks while they change, then the rest at one moment.

    Used on the thread that changes the tables. The caller reads the rows of a block before anything else runs
    there, and asks for none while only some of the rows of a number are stamped.

    Attributes:
        limit: bytes that the rest may take.
    """

    def __init__(self, tables: Sequence[StampedTable], after: Sequence[int], limit: int) -> None:
        """Copy the rows of each table that are stamped after its number in `after`."""
        self.limit = limit
        self._walks = [_Walk(table, number) for table, number in zip(tables, after, strict=True)]
        self._slot = 0
        self._copied = self._look_at = 0
        self._round_bytes = self.left_bytes

    @property
    def left_bytes(self) -> int:
        """Bytes of ids and values of all rows that are left: about, and never too few."""
        return sum(walk.left_rows * walk.table.spec.row_bytes for walk in self._walks)

    def next_block(self, nbytes: int) -> tuple[int, Ids] | None:
        """The next rows to be read, of about `nbytes` at most: the index of their table, and ids ([n], ascending).

        Deleted rows are among them.

        Returns:
            None once the rest takes at most `limit` bytes, or a round has left nearly as much as it began with.
            After that a further call goes on with another round.
        """
        while True:
            # What is left shrinks by no more than what is copied, so there is no need to count it with each block.
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
        """All rows that are left at this moment, deleted ones too: indices of tables, and ids ([n], ascending)."""
        left = ((slot, walk.rest()) for slot, walk in enumerate(self._walks))
        return [(slot, ids) for slot, ids in left if len(ids)]

    def _begin_round(self) -> bool:
        """Begin the next round; whether the last one has left clearly less than it began with."""
        for walk in self._walks:
            walk.begin_again()
        before, self._round_bytes = self._round_bytes, self.left_bytes
        self._slot, self._look_at = 0, self._copied
        return self._round_bytes <= max(self.limit, before * _SHRINKS_TO)


class _Walk:
    """One table: how far the round has come, from slot 0 on."""

    def __init__(self, table: StampedTable, after: int) -> None:
        self.table = table
        # Rows in slots before `position` were copied as of number `began` or later, the others as of `since`.
        self.position, self.began, self.since = 0, after, after
        self.copied = 0

    @property
    def left_rows(self) -> int:
        """How many rows are left: never too few."""
        counts = self.table.counts
        again = counts.after(self.began) if self.position else 0
        if self.position >= self.table.slots:
            return again
        return min(counts.rows, max(0, counts.after(self.since) - self.copied) + again)

    def take(self, nbytes: int) -> Ids:
        """The next rows of the round ([n], ascending); none where it is through."""
        table, most = self.table, max(1, nbytes // self.table.spec.row_bytes)
        if not self.position:
            self.began = table.counts.newest
        windows, count = [np.zeros(0, np.int64)], 0
        while count < most and self.position < table.slots:
            last = min(table.slots, self.position + max(most, _WINDOW_ROWS))
            slots = table.changed_in(self.position, last, self.since)
            self.position = last
            if count + len(slots) > most:
                slots = slots[: most - count]
                self.position = int(slots[-1]) + 1
            windows.append(slots)
            count += len(slots)
        self.copied += count
        return table.ids_of(np.concatenate(windows))

    def rest(self) -> Ids:
        """The rows that are left ([n], ascending)."""
        if not self.position:  # The index has the ids of the newest changes: it need not read stamps.
            return self.table.changed_since(self.since)
        table, position = self.table, self.position
        again = table.changed_in(0, position, self.began)
        return table.ids_of(np.concatenate([again, table.changed_in(position, table.slots, self.since)]))

    def begin_again(self) -> None:
        """Go on from slot 0 with the rows that have changed since the walk began."""
        self.position, self.since, self.copied = 0, self.began, 0
