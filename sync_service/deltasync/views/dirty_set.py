"""The dirty rows of one table, and what was found when they were looked at."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Ids, Mask
from deltasync.kernels import dirty_rows

Floats = NDArray[np.float64]
Versions = NDArray[np.int64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Findings:
    """What a look at some rows has found: columns [n], sorted by id.

    Attributes:
        ids: int64, strictly ascending.
        norms: float64, L2 norms of the deltas.
        flags: uint8, `NEVER_SENT` and `DELETED` of `kernels.dirty_rows`.
        dirty: whether replicas hold something else than the row.
    """

    ids: Ids
    norms: Floats
    flags: Flags
    dirty: Mask

    @classmethod
    def to_come(cls, ids: Ids) -> "Findings":
        """Room for what will be found."""
        rows = len(ids)
        return cls(ids, np.empty(rows), np.empty(rows, np.uint8), np.empty(rows, np.bool_))

    @classmethod
    def unseen(cls, ids: Ids) -> "Findings":
        """Rows that are dirty, of which nothing else is known before a look at them."""
        rows = len(ids)
        return cls(ids, np.zeros(rows), np.zeros(rows, np.uint8), np.ones(rows, np.bool_))

    def __getitem__(self, rows: slice) -> "Findings":
        """Some of the rows, as views."""
        return Findings(self.ids[rows], self.norms[rows], self.flags[rows], self.dirty[rows])


@dataclass(frozen=True, eq=False)
class DirtySet:
    """The dirty rows of a table: columns [n], sorted by id. It never changes; each change makes another.

    Attributes:
        ids: int64, strictly ascending.
        norms: float64, L2 norms of the deltas: the model's row less the row that replicas hold; never NaN.
        since: int64, the version since which each is dirty.
        flags: uint8, `NEVER_SENT` and `DELETED` of `kernels.dirty_rows`.
    """

    ids: Ids
    norms: Floats
    since: Versions
    flags: Flags

    @classmethod
    def of_marks(cls, marks: Versions) -> "DirtySet":
        """The rows that are marked ([N], 0 = not), of which nothing else is known before a look at them."""
        ids = np.flatnonzero(marks)
        return cls(ids, np.zeros(len(ids)), marks[ids], np.zeros(len(ids), np.uint8))

    def __len__(self) -> int:
        """How many rows are dirty."""
        return len(self.ids)

    @property
    def never_sent(self) -> Mask:
        """Which of them no replica was ever sent."""
        mask: Mask = (self.flags & dirty_rows.NEVER_SENT) != 0
        return mask

    @property
    def deleted(self) -> Mask:
        """Which of them are no more."""
        mask: Mask = (self.flags & dirty_rows.DELETED) != 0
        return mask

    def after(self, seen: Findings, version: int) -> "DirtySet":
        """The set after a look at some rows: those that were not dirty before are so since `version`."""
        after = DirtySet(*_room(len(self) + len(seen.ids)))
        return after._first(
            dirty_rows.merge(
                *self._columns, seen.ids, seen.norms, seen.flags, seen.dirty, version, *after._columns
            )
        )

    def without(self, ids: Ids) -> "DirtySet":
        """The set without these rows ([m], strictly ascending), as far as they are in it."""
        if not len(ids):
            return self
        after = DirtySet(*_room(len(self)))
        return after._first(dirty_rows.remove(*self._columns, ids, *after._columns))

    def _first(self, rows: int) -> "DirtySet":
        return DirtySet(self.ids[:rows], self.norms[:rows], self.since[:rows], self.flags[:rows])

    @property
    def _columns(self) -> tuple[Ids, Floats, Versions, Flags]:
        return self.ids, self.norms, self.since, self.flags


def _room(rows: int) -> tuple[Ids, Floats, Versions, Flags]:
    return np.empty(rows, np.int64), np.empty(rows), np.empty(rows, np.int64), np.empty(rows, np.uint8)
