"""Count and find the rows of a table that changed after a number, without reading all stamps."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Ids
from deltasync.kernels import stamps as stamp_kernels
from deltasync.kernels.stamps import GROUP_SHIFTS, GROUPS, count_groups

Stamps: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int64]

_COLUMN, _AGES = np.array(GROUP_SHIFTS)[:, None], np.arange(GROUPS)


@dataclass(frozen=True, eq=False)
class ChangeCounts:
    """Counts of rows by stamp: exact for the newest 64 numbers, in ever larger groups for older ones.

    Deleted rows, whose stamps are negative, count like others. It takes 1.5 kB, whatever it counts. It is
    immutable, so any thread may read it.

    Attributes:
        rows: number of rows, including those that never changed.
        changed: number of rows that ever changed, with a stamp other than 0.
        newest: upper bound of the stamps.
    """

    rows: int
    changed: int
    newest: int
    # [3, 64]: rows with a stamp in the newest 1, 2 ... 64 groups, for each size of group.
    _within: Counts

    @classmethod
    def unchanged(cls, rows: int) -> "ChangeCounts":
        """The counts of rows that never changed."""
        return cls(rows, 0, 0, np.full((len(GROUP_SHIFTS), GROUPS), rows))

    @classmethod
    def of(cls, stamps: Stamps) -> "ChangeCounts":
        """The counts of rows with these stamps ([n])."""
        return cls.unchanged(0).plus(stamps)

    def moved(self, before: Stamps, number: int) -> "ChangeCounts":
        """The counts after rows with stamps `before` ([n]) get stamp `number`, 1 or more."""
        seen, rows = self._from(number), len(before)
        oldest = _oldest(seen.newest)
        within = rows - _within(before, seen.newest)
        if number < seen.newest:
            within = within - rows * (oldest > number)
        return seen._with(0, rows - int(np.count_nonzero(before)), within)

    def plus(self, stamps: Stamps) -> "ChangeCounts":
        """The counts with more rows of these stamps ([n])."""
        if not len(stamps):
            return self
        seen = self._from(max(int(stamps.max()), -int(stamps.min())))
        return seen._with(len(stamps), int(np.count_nonzero(stamps)), _within(stamps, seen.newest))

    def plus_rows(self, rows: int, number: int) -> "ChangeCounts":
        """The counts with more rows that all have stamp `number`, 1 or more."""
        seen = self._from(number)
        return seen._with(rows, rows, rows * (_oldest(seen.newest) <= number))

    def plus_unchanged(self, rows: int) -> "ChangeCounts":
        """The counts with more rows that never changed."""
        return self._with(rows, 0, ChangeCounts.unchanged(rows)._from(self.newest)._within)

    def without(self, stamps: Stamps) -> "ChangeCounts":
        """The counts without rows of these stamps ([n])."""
        if not len(stamps):
            return self
        return self._with(-len(stamps), -int(np.count_nonzero(stamps)), -_within(stamps, self.newest))

    def after(self, number: int) -> int:
        """The number of rows with a stamp above `number`. Exact for 0 and the newest 64 numbers, otherwise an
        upper bound, since the whole group of `number` counts.
        """
        if number >= self.newest:
            return 0
        for within, shift in zip(self._within, GROUP_SHIFTS, strict=True):
            age = (self.newest >> shift) - ((number + 1) >> shift)
            if age < GROUPS:
                # The oldest group of all also contains the rows that never changed.
                return min(int(within[age]), self.changed)
        return self.changed

    def _from(self, newest: int) -> "ChangeCounts":
        """The same counts, with room for stamps up to `newest`."""
        if newest <= self.newest:
            return self
        within = self._within.copy()
        for level, shift in enumerate(GROUP_SHIFTS):
            new = min(GROUPS, (newest >> shift) - (self.newest >> shift))
            if new:  # Usually only for the smallest groups.
                within[level, new:] = self._within[level, : GROUPS - new]
                within[level, :new] = 0
        return ChangeCounts(self.rows, self.changed, newest, within)

    def _with(self, rows: int, changed: int, within: Counts) -> "ChangeCounts":
        return ChangeCounts(self.rows + rows, self.changed + changed, self.newest, self._within + within)


@lru_cache  # All tables of a cut share the result.
def _oldest(newest: int) -> Stamps:
    """[3, 64]: the oldest number of the newest 1, 2 ... 64 groups."""
    oldest: Stamps = ((newest >> _COLUMN) - _AGES) << _COLUMN
    return oldest


def _within(stamps: Stamps, newest: int) -> Counts:
    """[3, 64]: the number of `stamps` ([n]) in the newest 1, 2 ... 64 groups."""
    counts = np.zeros((len(GROUP_SHIFTS), GROUPS + 1), np.int64)
    count_groups(np.require(stamps, np.int64, ["C", "A"]), newest, counts)
    return counts[:, :GROUPS].cumsum(axis=1)


# The index keeps the ids of a change to at most one in this number of rows. For larger changes, reading all stamps
# in order is as fast as looking up single rows.
_ROWS_OF_AN_ID = 8
_IDS_BYTES = 16 << 20
# Size of a note without its ids, expressed in ids.
_NOTE_IDS = 32


class ChangeIndex:
    """Finds the rows of a table that are stamped after a number. Used on the thread that stamps them.

    For the newest changes it has the row ids in order, for receivers that are nearly up to date. For older ones it
    has the largest number of each block of rows, and reads the stamps of newer blocks. The stamps decide, since
    both may include other rows. The index takes up to 13 % of the memory of the stamps.
    """

    def __init__(self, stamps: Stamps) -> None:
        """`stamps` ([N]) is the table's own array, which the table changes."""
        self._stamps = np.asarray(stamps)
        self._largest = np.zeros(_blocks(len(stamps)), np.int64)
        stamp_kernels.largest_of_blocks(self._stamps, self._largest)
        # Each note has the largest number so far, so that these ascend.
        self._notes: deque[tuple[int, Ids]] = deque()
        self._noted_ids = 0
        self._newest = self._known_since = int(self._largest.max(initial=0))

    def extend(self, stamps: Stamps) -> None:
        """Use a larger array of stamps, whose new rows never changed."""
        more = _blocks(len(stamps)) - len(self._largest)
        self._largest = np.concatenate([self._largest, np.zeros(more, np.int64)])
        self._stamps = np.asarray(stamps)

    def note(self, ids: Ids, number: int) -> None:
        """Note that the rows `ids` ([n], strictly ascending) are about to get stamp `number`."""
        ids = np.require(ids, np.int64, ["C", "A"])
        stamp_kernels.raise_blocks(ids, number, self._largest)
        self._add(ids, number)

    def note_each(self, ids: Ids, stamps: Stamps) -> None:
        """Note that the rows `ids` ([n], strictly ascending) are about to get these stamps ([n])."""
        ids = np.require(ids, np.int64, ["C", "A"])
        stamp_kernels.raise_blocks_to_each(ids, np.require(stamps, np.int64, ["C", "A"]), self._largest)
        self._add(ids, int(np.abs(stamps).max(initial=0)))

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, including deleted ones."""
        if number >= self._newest:
            return np.zeros(0, np.int64)
        if number >= self._known_since:
            return self._of_notes(number)
        return self.changed_in(0, len(self._stamps), number)

    def changed_in(self, first: int, last: int, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows in `first` to `last` - 1 that are stamped after `number`.

        It reads only the stamps of blocks that may have newer ones. `number` must not be negative.
        """
        last = min(last, len(self._stamps))
        start = first // stamp_kernels.BLOCK_ROWS
        largest, stamps = (
            self._largest[start : _blocks(last)],
            self._stamps[start * stamp_kernels.BLOCK_ROWS : last],
        )
        room = np.empty(stamp_kernels.rows_in_newer_blocks(largest, number), np.int64)
        ids = room[: stamp_kernels.rows_after(stamps, largest, number, room)] + start * stamp_kernels.BLOCK_ROWS
        return ids[np.searchsorted(ids, first) :]

    def _add(self, ids: Ids, number: int) -> None:
        """Keep ids of a change, and forget the oldest if there are too many."""
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
        result = np.empty_like(ids)
        return result[: stamp_kernels.rows_of_after(ids, self._stamps, number, result)]


def _blocks(rows: int) -> int:
    return -(-rows // stamp_kernels.BLOCK_ROWS)
