"""Choose the dirty rows of a release over all tables of a consumer. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.base.words import counted
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.kernels.ranking import rank_rows, take_largest

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ranks = NDArray[np.uint64]
Numbers = NDArray[np.int64]
N = TypeVar("N", bound=np.generic)

_ONE = np.ones(1, np.int64)


@dataclass(frozen=True)
class DirtyRows:
    """The dirty rows of one table, sorted by id.

    Attributes:
        ids: [n] row ids, strictly ascending.
        norms: [n] float64, L2 norms of the deltas, the model's row minus the replicas' row; never NaN.
        never_sent: [n] whether no replica ever got the row.
        overdue: [n] whether the row has been dirty for longer than the policy's maximum age.
        forced: [n] whether the next release must take it under any policy: unranked rows, deletes, and rows whose
            id has changed.
        row_bytes: size of one row in a release, in bytes.
    """

    ids: Ids
    norms: Floats
    never_sent: Mask
    overdue: Mask
    forced: Mask
    row_bytes: int


@dataclass(frozen=True)
class Pick:
    """The rows of a release as a mask over each table's dirty rows, and the reason in one sentence."""

    taken: list[Mask]
    reason: str


def pick(tables: Sequence[DirtyRows], policy: Policy, rest_after: int = 0) -> Pick:
    """Choose the rows of the next release: all forced rows, and the others as the policy allows.

    The others are ranked: rows that were never sent come first, then larger norms of the delta; ties go by table
    and row id. The release takes the first `top_k` rows and all overdue ones. If they exceed `max_bytes`, it takes
    overdue rows first, then the others by rank, but at least one row.

    Args:
        tables: the dirty rows of each table.
        policy: the consumer's policy.
        rest_after: number of rows of the last release, if no version has come since; otherwise 0. A share takes
            at least this number. The rest then goes out in a few equal releases, where a share of the rest would
            become smaller and smaller.
    """
    if not any(len(table.ids) for table in tables):
        return Pick([np.zeros(0, np.bool_) for _ in tables], "took all 0 dirty rows")
    rows = _Candidates.of(tables)
    wanted = rows.overdue | rows.top(policy, rest_after)
    taken = wanted if policy.max_bytes is None else rows.within(wanted, policy.max_bytes)
    reason, forced = rows.reason(wanted, taken, policy, rest_after), _count(rows.forced)
    if forced:
        taken, reason = taken | rows.forced, f"{reason}; and {forced} that every policy sends at once"
    return Pick(np.split(taken, rows.ends), reason)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The dirty rows of all tables, one table after the other.

    Attributes:
        ranks: [n] uint64, the order of the rows.
        never_sent: [n] whether a row was never sent.
        free: [n] whether the policy applies to it.
        overdue: [n] whether it is free and overdue.
        forced: [n] whether the policy does not apply to it.
        ends: the end of each table except the last.
        sizes: [n] int64, size of each row in bytes; or [1] if all are equal.
    """

    ranks: Ranks
    never_sent: Mask
    free: Mask
    overdue: Mask
    forced: Mask
    ends: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, tables: Sequence[DirtyRows]) -> "_Candidates":
        norms, never_sent = _joined([each.norms for each in tables]), _joined([each.never_sent for each in tables])
        overdue, forced = _joined([each.overdue for each in tables]), _joined([each.forced for each in tables])
        ranks, lengths = np.empty(len(norms), np.uint64), [len(each.ids) for each in tables]
        rank_rows(norms.view(np.uint64), never_sent, ranks)
        sizes = np.array([each.row_bytes for each in tables], np.int64)
        sizes = np.repeat(sizes, lengths) if (sizes != sizes[0]).any() else sizes[:1]
        return cls(ranks, never_sent, ~forced, overdue & ~forced, forced, np.cumsum(lengths)[:-1], sizes)

    def top(self, policy: Policy, rest_after: int) -> Mask:
        """The first rows of the ranking, over all tables or in each."""
        if policy.top_k is None:
            return self.free
        top_k = policy.top_k
        if top_k < 1 and rest_after:
            top_k = max(top_k, rest_after / max(_count(self.free), rest_after))
        groups = np.split(self.ranks, self.ends), np.split(self.free, self.ends)
        if not policy.top_k_per_table:
            groups = [self.ranks], [self.free]
        return _joined([_top(*each, top_k) for each in zip(*groups, strict=True)])

    def within(self, wanted: Mask, max_bytes: int) -> Mask:
        """The most urgent rows of `wanted` that fit into `max_bytes`."""
        if self._bytes(wanted) <= max_bytes:
            return wanted
        left = max_bytes - self._bytes(self.overdue)
        if left < 0:
            return self._fitting(self.overdue, max_bytes)
        return self.overdue | self._fitting(wanted & ~self.overdue, left, least=not self.overdue.any())

    def _fitting(self, wanted: Mask, max_bytes: int, *, least: bool = True) -> Mask:
        """The first rows of `wanted` that fit; with `least`, at least one."""
        taken = take_largest(self.ranks, self.sizes, wanted, max_bytes)
        return _first(self.ranks, wanted, 1) if least and not taken.any() else taken

    def _bytes(self, rows: Mask) -> int:
        return _count(rows) * int(self.sizes[0]) if len(self.sizes) == 1 else int(self.sizes.sum(where=rows))

    def reason(self, wanted: Mask, taken: Mask, policy: Policy, rest_after: int) -> str:
        dirty, took, fit = _count(self.free), _count(taken), _count(wanted)
        if took == dirty:
            return f"took all {counted(dirty, 'dirty row')}"
        new, old = _count(self.never_sent & taken), _count(self.overdue & taken)
        ranked = policy.top_k and fit < dirty
        why = [f"top_k {_amount(policy)} takes those that have changed most"] if ranked else []
        rest = ranked and rest_after and isinstance(policy.top_k, float)
        why += ["at least as many as the last release, as no version is newer"] if rest else []
        why += [f"no more than {took} of {fit} fit max_bytes {policy.max_bytes}"] if took < fit else []
        why += [f"{new} were never sent before"] if new else []
        why += [f"{old} were older than max_age_seconds {policy.max_age_seconds:.15g}"] if old else []
        return f"took {took} of {counted(dirty, 'dirty row')}: {'; '.join(why)}"


def _top(ranks: Ranks, free: Mask, top_k: float) -> Mask:
    """The rows that top-k selects."""
    rows = _count(free)
    count = max(1, math.ceil(round(top_k * rows, 6))) if isinstance(top_k, float) else top_k
    return free if count >= rows else _first(ranks, free, count)


def _first(ranks: Ranks, wanted: Mask, count: int) -> Mask:
    """The first `count` rows of `wanted` by rank."""
    return take_largest(ranks, _ONE, wanted, count)


def _joined(parts: Sequence[NDArray[N]]) -> NDArray[N]:
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _amount(policy: Policy) -> str:
    top_k = policy.top_k or 0.0
    amount = f"{100 * top_k:g} %" if top_k < 1 else f"{top_k:.15g}"
    return f"{amount} per table" if policy.top_k_per_table else amount
