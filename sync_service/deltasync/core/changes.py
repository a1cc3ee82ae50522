"""How many rows of a table changed after a number, and which, without reading all stamps."""

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
    """How many of some rows have which stamp: by number for the newest 64 numbers, by ever larger groups before.

    Deleted rows, of which stamps are negative, count like others.
    Takes 1.5 kB, whatever it counts. It never changes, each change makes another: any thread may read one.

    Attributes:
        rows: the rows; those that never changed are counted too.
        changed: those that ever changed: their stamp is not 0.
        newest: a number above which there is no stamp.
    """

    rows: int
    changed: int
    newest: int
    # [3, 64]: rows with a stamp in the newest 1, 2 ... 64 groups, for each size of group.
    _within: Counts

    @classmethod
    def unchanged(cls, rows: int) -> "ChangeCounts":
        """Of rows that never changed."""
        return cls(rows, 0, 0, np.full((len(GROUP_SHIFTS), GROUPS), rows))

    @classmethod
    def of(cls, stamps: Stamps) -> "ChangeCounts":
        """Of rows with these stamps ([n])."""
        return cls.unchanged(0).plus(stamps)

    def moved(self, before: Stamps, number: int) -> "ChangeCounts":
        """With some rows stamped with `number`, 1 or more, instead of what they were before ([n])."""
        seen, rows = self._from(number), len(before)
        oldest = _oldest(seen.newest)
        within = rows - _within(before, seen.newest)
        if number < seen.newest:
            within = within - rows * (oldest > number)
        return seen._with(0, rows - int(np.count_nonzero(before)), within)

    def plus(self, stamps: Stamps) -> "ChangeCounts":
        """With more rows, which have these stamps ([n])."""
        if not len(stamps):
            return self
        seen = self._from(max(int(stamps.max()), -int(stamps.min())))
        return seen._with(len(stamps), int(np.count_nonzero(stamps)), _within(stamps, seen.newest))

    def plus_rows(self, rows: int, number: int) -> "ChangeCounts":
        """With so many more rows, all stamped with `number`, 1 or more."""
        seen = self._from(number)
        return seen._with(rows, rows, rows * (_oldest(seen.newest) <= number))

    def plus_unchanged(self, rows: int) -> "ChangeCounts":
        """With so many more rows, which never changed."""
        return self._with(rows, 0, ChangeCounts.unchanged(rows)._from(self.newest)._within)

    def without(self, stamps: Stamps) -> "ChangeCounts":
        """Without some of the rows, which have these stamps ([n])."""
        if not len(stamps):
            return self
        return self._with(-len(stamps), -int(np.count_nonzero(stamps)), -_within(stamps, self.newest))

    def after(self, number: int) -> int:
        """How many rows have a stamp above `number`: exact for 0 and the newest 64 numbers, else never too few,
        since the group that `number` is in counts whole.
        """
        if number >= self.newest:
            return 0
        for within, shift in zip(self._within, GROUP_SHIFTS, strict=True):
            age = (self.newest >> shift) - ((number + 1) >> shift)
            if age < GROUPS:
                # The oldest group of all has the rows that never changed, too.
                return min(int(within[age]), self.changed)
        return self.changed

    def _from(self, newest: int) -> "ChangeCounts":
        """The same rows, where there may be stamps up to `newest`."""
        if newest <= self.newest:
            return self
        within = self._within.copy()
        for level, shift in enumerate(GROUP_SHIFTS):
            new = min(GROUPS, (newest >> shift) - (self.newest >> shift))
            if new:  # Most often, of the smallest groups alone.
                within[level, new:] = self._within[level, : GROUPS - new]
                within[level, :new] = 0
        return ChangeCounts(self.rows, self.changed, newest, within)

    def _with(self, rows: int, changed: int, within: Counts) -> "ChangeCounts":
        return ChangeCounts(self.rows + rows, self.changed + changed, self.newest, self._within + within)


@lru_cache  # All tables of a cut have the same one.
def _oldest(newest: int) -> Stamps:
    """[3, 64]: the oldest number of the newest 1, 2 ... 64 groups."""
    oldest: Stamps = ((newest >> _COLUMN) - _AGES) << _COLUMN
    return oldest


def _within(stamps: Stamps, newest: int) -> Counts:
    """[3, 64]: how many of `stamps` ([n]) are in the newest 1, 2 ... 64 groups."""
    counts = np.zeros((len(GROUP_SHIFTS), GROUPS + 1), np.int64)
    count_groups(np.require(stamps, np.int64, ["C", "A"]), newest, counts)
    return counts[:, :GROUPS].cumsum(axis=1)


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
        stamp_kernels.largest_of_blocks(self._stamps, self._largest)
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
        stamp_kernels.raise_blocks(ids, number, self._largest)
        self._add(ids, number)

    def note_each(self, ids: Ids, stamps: Stamps) -> None:
        """Note that the rows `ids` ([n], strictly ascending) are about to have these stamps ([n])."""
        ids = np.require(ids, np.int64, ["C", "A"])
        stamp_kernels.raise_blocks_to_each(ids, np.require(stamps, np.int64, ["C", "A"]), self._largest)
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
        start = first // stamp_kernels.BLOCK_ROWS
        largest, stamps = (
            self._largest[start : _blocks(last)],
            self._stamps[start * stamp_kernels.BLOCK_ROWS : last],
        )
        found = np.empty(stamp_kernels.rows_in_newer_blocks(largest, number), np.int64)
        ids = found[: stamp_kernels.rows_after(stamps, largest, number, found)] + start * stamp_kernels.BLOCK_ROWS
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
        return found[: stamp_kernels.rows_of_after(ids, self._stamps, number, found)]


def _blocks(rows: int) -> int:
    return -(-rows // stamp_kernels.BLOCK_ROWS)
