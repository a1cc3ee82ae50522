"""Which rows have changed after a number, at the cost of those that have."""

from collections import deque
from itertools import pairwise, takewhile

import numpy as np

from deltasync.core.change_counts import Stamps
from deltasync.core.rows import Ids
from deltasync.kernels import stamps as kernels

# Ids are kept of one change in so many rows: with more, to read all stamps in their order is as quick as to look
# up those of single rows.
_ROWS_OF_AN_ID = 8
_IDS_BYTES = 16 << 20
# What a note takes beside its ids, in ids.
_NOTE_IDS = 32


class ChangeIndex:
    """Finds the rows of a table that are stamped after a number. Used on the thread that stamps them.

    Of the newest changes it has the ids, in the order in which they were noted: for receivers that are nearly up
    to date. For the others it has the largest number of each block of rows, and reads the stamps of newer blocks.
    Both may name more rows than are stamped so: the stamps decide. It takes up to 13 % of what the stamps take.
    """

    def __init__(self, stamps: Stamps) -> None:
        """`stamps` ([N]) are the table's own, which others change."""
        self._stamps = np.asarray(stamps)
        self._largest = np.zeros(_blocks(len(stamps)), np.int64)
        kernels.largest_of_blocks(self._stamps, self._largest)
        # Each with the largest number so far: these ascend, whatever is noted.
        self._notes: deque[tuple[int, Ids]] = deque()
        self._noted_ids = 0
        self._newest = self._known_since = int(self._largest.max(initial=0))

    def extend(self, stamps: Stamps) -> None:
        """Go on with the stamps of the table once it has more rows, which never changed."""
        more = _blocks(len(stamps)) - len(self._largest)
        self._largest = np.concatenate([self._largest, np.zeros(more, np.int64)])
        self._stamps = np.asarray(stamps)

    def note(self, ids: Ids, number: int) -> None:
        """Note that the rows `ids` ([n], strictly ascending) are about to be stamped with `number`."""
        ids = np.require(ids, np.int64, ["C", "A"])
        kernels.raise_blocks(ids, number, self._largest)
        self._add(ids, number)

    def note_each(self, ids: Ids, stamps: Stamps) -> None:
        """Note that the rows `ids` ([n], strictly ascending) are about to have these stamps ([n])."""
        ids = np.require(ids, np.int64, ["C", "A"])
        kernels.raise_blocks_to_each(ids, np.require(stamps, np.int64, ["C", "A"]), self._largest)
        self._add(ids, int(np.abs(stamps).max(initial=0)))

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, deleted ones among them."""
        if number >= self._newest:
            return np.zeros(0, np.int64)
        if number >= self._known_since:
            return self._of_notes(number)
        return self.changed_in(0, len(self._stamps), number)

    def changed_in(self, first: int, last: int, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows from `first` to before `last` that are stamped after `number`.

        It reads the stamps of those blocks only that may have a newer one. The number is 0 or more.
        """
        last = min(last, len(self._stamps))
        start = first // kernels.BLOCK_ROWS
        largest, stamps = self._largest[start : _blocks(last)], self._stamps[start * kernels.BLOCK_ROWS : last]
        found = np.empty(kernels.rows_in_newer_blocks(largest, number), np.int64)
        ids = found[: kernels.rows_after(stamps, largest, number, found)] + start * kernels.BLOCK_ROWS
        return ids[np.searchsorted(ids, first) :]

    def _add(self, ids: Ids, number: int) -> None:
        """Keep some ids, and forget the oldest where there are too many of them."""
        self._newest = max(self._newest, number)
        room = min(_IDS_BYTES // ids.itemsize, len(self._stamps) // _ROWS_OF_AN_ID)
        if len(ids) + _NOTE_IDS > room:
            self._known_since = self._newest
        elif len(ids):
            self._notes.append((self._newest, ids.copy()))
            self._noted_ids += len(ids) + _NOTE_IDS
        while self._notes and (self._noted_ids > room or self._notes[0][0] <= self._known_since):
            newest, forgotten = self._notes.popleft()
            self._known_since = max(self._known_since, newest)
            self._noted_ids -= len(forgotten) + _NOTE_IDS

    def _of_notes(self, number: int) -> Ids:
        newer = [ids for _, ids in takewhile(lambda note: note[0] > number, reversed(self._notes))][::-1]
        ids = np.concatenate([np.zeros(0, np.int64), *newer])
        if any(after[0] <= before[-1] for before, after in pairwise(newer)):
            ids.sort()
        found = np.empty_like(ids)
        return found[: kernels.rows_of_after(ids, self._stamps, number, found)]


def _blocks(rows: int) -> int:
    return -(-rows // kernels.BLOCK_ROWS)
