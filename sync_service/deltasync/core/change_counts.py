"""How many rows have changed after a number, without a look at their stamps."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
