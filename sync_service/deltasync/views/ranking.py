"""Which dirty rows a release takes: pure decisions over all tables of a consumer at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.kernels.ranking import take_largest

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True)
class DirtyRows:
    """The dirty rows of one table, sorted by id.

    Attributes:
        ids: [n] row ids, strictly ascending.
        norms: [n] float64, L2 norms of the deltas: the model's row less the row that replicas hold; never NaN.
        never_sent: [n] whether the row was never sent to any replica.
        overdue: [n] whether it is dirty for longer than the policy's maximum age.
        forced: [n] whether it goes with the next release, whatever the policy: what is not ranked, deletes, and
            rows that another id has now.
        row_bytes: bytes of one of the rows in a release.
    """

    ids: Ids
    norms: Floats
    never_sent: Mask
    overdue: Mask
    forced: Mask
    row_bytes: int


@dataclass(frozen=True)
class Pick:
    """What a release takes: a mask over the dirty rows of each table, and in one sentence why these rows."""

    taken: list[Mask]
    reason: str


def pick(tables: Sequence[DirtyRows], policy: Policy) -> Pick:
    """What the next release takes: all that is forced, and of the others what the policy lets out.

    The others are ranked: first those that were never sent, then by the norm of their delta, and equal ones by
    table and row id. The release takes the first `top_k` rows, and all that are overdue. If these do not fit
    `max_bytes`, it takes overdue rows first, then the others in the order of the ranking. It takes at least one.
    """
    if not any(len(table.ids) for table in tables):
        return Pick([np.zeros(0, np.bool_) for _ in tables], "took all 0 dirty rows")
    rows = _Candidates.of(tables)
    wanted = rows.overdue | rows.top(policy)
    taken = wanted if policy.max_bytes is None else rows.within(wanted, policy.max_bytes)
    reason, forced = rows.reason(wanted, taken, policy), _count(rows.forced)
    if forced:
        taken, reason = taken | rows.forced, f"{reason}; and {forced} that no policy holds back"
    return Pick(np.split(taken, rows.ends[:-1]), reason)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The dirty rows of all tables, one table after the other.

    Attributes:
        norms: [n] float64, L2 norms of the deltas.
        never_sent: [n] whether a row was never sent.
        free: [n] whether the policy has a say in it.
        overdue: [n] whether it is one of these and overdue.
        forced: [n] whether the policy has none.
        ends: [tables] where each table ends.
        row_bytes: [tables] bytes of each of its rows.
    """

    norms: Floats
    never_sent: Mask
    free: Mask
    overdue: Mask
    forced: Mask
    ends: Numbers
    row_bytes: Numbers

    @classmethod
    def of(cls, tables: Sequence[DirtyRows]) -> "_Candidates":
        norms, never_sent = _joined([each.norms for each in tables]), _joined([each.never_sent for each in tables])
        overdue, forced = _joined([each.overdue for each in tables]), _joined([each.forced for each in tables])
        ends = np.cumsum([len(each.ids) for each in tables], dtype=np.int64)
        sizes = np.array([each.row_bytes for each in tables], np.int64)
        return cls(norms, never_sent, ~forced, overdue & ~forced, forced, ends, sizes)

    def top(self, policy: Policy) -> Mask:
        """The first rows of the ranking: of all tables together, or of each."""
        if policy.top_k is None:
            return self.free
        if not policy.top_k_per_table:
            return self._top(slice(None), policy.top_k)
        starts = [0, *self.ends.tolist()]
        return _joined([self._top(slice(*each), policy.top_k) for each in pairwise(starts)])

    def _top(self, rows: slice, top_k: float) -> Mask:
        free = self.free[rows]
        count, among = _rows_of(top_k, _count(free)), np.array([len(free)])
        return free if count is None else self._largest(rows, free, among, np.ones(1, np.int64), count)

    def within(self, wanted: Mask, max_bytes: int) -> Mask:
        """The most urgent of the wanted rows that fit."""
        if self._bytes(wanted) <= max_bytes:
            return wanted
        left = max_bytes - self._bytes(self.overdue)
        if left < 0:
            return self._fitting(self.overdue, max_bytes)
        return self.overdue | self._fitting(wanted & ~self.overdue, left, least=not self.overdue.any())

    def _fitting(self, wanted: Mask, max_bytes: int, *, least: bool = True) -> Mask:
        """The first of the wanted rows that fit; `least`: at least one of them."""
        taken = self._largest(slice(None), wanted, self.ends, self.row_bytes, max_bytes)
        if not least or taken.any():
            return taken
        return self._largest(slice(None), wanted, self.ends[-1:], np.ones(1, np.int64), 1)

    def _largest(self, rows: slice, wanted: Mask, ends: Numbers, sizes: Numbers, budget: int) -> Mask:
        taken = np.empty(len(wanted), np.bool_)
        norms, never_sent = self.norms[rows].view(np.uint64), self.never_sent[rows]
        take_largest(norms, never_sent, wanted, ends, sizes, budget, taken)
        return taken

    def _bytes(self, rows: Mask) -> int:
        counts = [_count(each) for each in np.split(rows, self.ends[:-1])]
        return int(np.dot(counts, self.row_bytes))

    def reason(self, wanted: Mask, taken: Mask, policy: Policy) -> str:
        dirty, took, fit = _count(self.free), _count(taken), _count(wanted)
        if took == dirty:
            return f"took all {dirty} dirty rows"
        new, old = _count(self.never_sent & taken), _count(self.overdue & taken)
        ranked = policy.top_k and fit < dirty
        why = [f"top_k {_amount(policy)} takes those that have changed most"] if ranked else []
        why += [f"no more than {took} of {fit} fit max_bytes {policy.max_bytes}"] if took < fit else []
        why += [f"{new} were never sent before"] if new else []
        why += [f"{old} were older than max_age_seconds {policy.max_age_seconds:g}"] if old else []
        return f"took {took} of {dirty} dirty rows: {'; '.join(why)}"


def _rows_of(top_k: float, dirty: int) -> int | None:
    """How many rows a top-k lets out of so many; None = all."""
    count = max(1, math.ceil(round(top_k * dirty, 6))) if top_k < 1 else int(top_k)
    return count if count < dirty else None


def _joined(parts: Sequence[NDArray[N]]) -> NDArray[N]:
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _amount(policy: Policy) -> str:
    top_k = policy.top_k or 0.0
    amount = f"{100 * top_k:g} %" if top_k < 1 else f"{top_k:.15g}"
    return f"{amount} per table" if policy.top_k_per_table else amount
