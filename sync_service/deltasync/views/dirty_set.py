"""The dirty rows of one table, sorted by id: what a release costs, however large the table is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.core.change_counts import ChangeCounts, Stamps
from deltasync.core.id_sets import members
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
    def joined(cls, parts: "Sequence[Findings]") -> "Findings":
        """Several of them, of ascending rows, as one."""
        columns = zip(*((each.ids, each.norms, each.flags, each.dirty) for each in parts), strict=True)
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, columns))


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
        """Which of them are deleted."""
        mask: Mask = (self.flags & dirty_rows.DELETED) != 0
        return mask

    def after(
        self, seen: Findings, version: int, held_stamps: Stamps, clean: ChangeCounts
    ) -> "tuple[DirtySet, ChangeCounts]":
        """The set after a look at some rows, and the counts of the stamps of rows that are not dirty.

        Args:
            seen: what was found. Rows that were not dirty before are dirty since `version`.
            version: see there.
            held_stamps: [N], when replicas were last sent each row of the table.
            clean: counts of the stamps of all rows that were not dirty before the look.
        """
        to = _room(len(self) + len(seen.ids))
        marked, cleaned = np.empty((2, len(seen.ids)), np.int64)
        columns, found = self._columns, (seen.ids, seen.norms, seen.flags, seen.dirty)
        rows, came, left = dirty_rows.merge(*columns, *found, version, held_stamps, *to._columns, marked, cleaned)
        return to._first(rows), clean.without(marked[:came]).plus(cleaned[:left])

    def dated_as(self, before: "DirtySet", version: int) -> "DirtySet":
        """The same rows: dirty since when `before` says, or since `version` where they are not among those."""
        since = np.full(len(self), version)
        since[members(self.ids, before.ids)] = before.since[members(before.ids, self.ids)]
        return DirtySet(self.ids, self.norms, since, self.flags)

    def without(self, ids: Ids) -> "DirtySet":
        """The set without these rows ([m], strictly ascending), as far as they are in it."""
        if not len(ids):
            return self
        to = _room(len(self))
        return to._first(dirty_rows.remove(*self._columns, ids, *to._columns))

    def _first(self, rows: int) -> "DirtySet":
        return DirtySet(self.ids[:rows], self.norms[:rows], self.since[:rows], self.flags[:rows])

    @property
    def _columns(self) -> tuple[Ids, Floats, Versions, Flags]:
        return self.ids, self.norms, self.since, self.flags


def _room(rows: int) -> DirtySet:
    return DirtySet(np.empty(rows, np.int64), np.empty(rows), np.empty(rows, np.int64), np.empty(rows, np.uint8))


NONE_DIRTY = _room(0)
