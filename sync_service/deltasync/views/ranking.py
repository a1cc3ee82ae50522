"""Which dirty rows a release takes: pure decisions over all tables of a consumer at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.feeds.statistics import Amount

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ranks = NDArray[np.uint64]


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

    @property
    def ranked(self) -> "DirtyRows":
        """Those that are not forced."""
        free = ~self.forced
        return DirtyRows(
            self.ids[free],
            self.norms[free],
            self.never_sent[free],
            self.overdue[free],
            self.forced[free],
            self.row_bytes,
        )


def amount_of(rows: DirtyRows, chosen: Mask) -> Amount:
    """How much the chosen ones of a table's dirty rows are."""
    count = int(np.count_nonzero(chosen))
    return Amount(count, count * rows.row_bytes, math.sqrt(float(np.square(rows.norms[chosen]).sum())))


@dataclass(frozen=True)
class Pick:
    """What a release takes: a mask over the dirty rows of each table, and in one sentence why these rows."""

    taken: list[Mask]
    reason: str


def pick(tables: Sequence[DirtyRows], policy: Policy) -> Pick:
    """What the next release takes: all that is forced, and of the others what the policy lets out."""
    forced = _total([table.forced for table in tables])
    if not forced:
        return _pick(tables, policy)
    ranked = _pick([table.ranked for table in tables], policy)
    taken = [table.forced.copy() for table in tables]
    for mask, table, of_ranked in zip(taken, tables, ranked.taken, strict=True):
        mask[~table.forced] = of_ranked
    return Pick(taken, f"{ranked.reason}; and {forced} that no policy holds back")


def _pick(tables: Sequence[DirtyRows], policy: Policy) -> Pick:
    """What it takes of rows that are ranked.

    Rows are ranked: first those that were never sent, then by the norm of their delta, and equal ones by table and
    row id. The release takes the first `top_k` rows, and all that are overdue. If these do not fit `max_bytes`, it
    takes overdue rows first, then the others in the order of the ranking. It takes at least one row.
    """
    ranks = [_ranks(table) for table in tables]
    wanted = [table.overdue | top for table, top in zip(tables, _top(ranks, policy), strict=True)]
    taken = wanted if policy.max_bytes is None else _within(tables, ranks, wanted, policy.max_bytes)
    return Pick(taken, _reason(tables, wanted, taken, policy))


def _ranks(table: DirtyRows) -> Ranks:
    """Numbers that order rows: the bits of the norm, which order as norms do; the topmost bit is `never_sent`."""
    return np.abs(table.norms).view(np.uint64) | table.never_sent.astype(np.uint64) << np.uint64(63)


def _top(ranks: Sequence[Ranks], policy: Policy) -> list[Mask]:
    """The first rows of the ranking: of all tables together, or of each."""
    if policy.top_k_per_table:
        return [_first(each, policy.top_k) for each in ranks]
    return _split(_first(_joined(ranks), policy.top_k), ranks)


def _first(ranks: Ranks, top_k: float | None) -> Mask:
    dirty = len(ranks)
    count = dirty if top_k is None else max(1, math.ceil(round(top_k * dirty, 6))) if top_k < 1 else int(top_k)
    if count >= dirty:
        return np.ones(dirty, np.bool_)
    last = np.partition(ranks, dirty - count)[dirty - count]
    taken: Mask = ranks > last
    ties = np.flatnonzero(ranks == last)
    taken[ties[: count - int(np.count_nonzero(taken))]] = True
    return taken


def _within(
    tables: Sequence[DirtyRows], ranks: Sequence[Ranks], wanted: Sequence[Mask], max_bytes: int
) -> list[Mask]:
    """The most urgent of the wanted rows that fit."""
    sizes = np.repeat([table.row_bytes for table in tables], [len(table.ids) for table in tables])
    chosen = np.flatnonzero(np.concatenate([*wanted, np.zeros(0, np.bool_)]))
    if int(sizes[chosen].sum()) <= max_bytes:
        return list(wanted)
    overdue = np.concatenate([*(table.overdue for table in tables), np.zeros(0, np.bool_)])
    ordered = chosen[np.lexsort((~_joined(ranks)[chosen], ~overdue[chosen]))]  # Stable: ties stay in order.
    fit = max(1, int(np.searchsorted(np.cumsum(sizes[ordered]), max_bytes, side="right")))
    taken = np.zeros(len(sizes), np.bool_)
    taken[ordered[:fit]] = True
    return _split(taken, ranks)


def _joined(parts: Sequence[Ranks]) -> Ranks:
    return np.concatenate([*parts, np.zeros(0, np.uint64)])


def _split(mask: Mask, like: Sequence[Ranks]) -> list[Mask]:
    ends = np.cumsum([len(each) for each in like])
    return np.split(mask, ends[:-1]) if like else []


def _reason(tables: Sequence[DirtyRows], wanted: Sequence[Mask], taken: Sequence[Mask], policy: Policy) -> str:
    dirty, took, fit = sum(len(table.ids) for table in tables), _total(taken), _total(wanted)
    if took == dirty:
        return f"took all {dirty} dirty rows"
    new = _total([table.never_sent & mask for table, mask in zip(tables, taken, strict=True)])
    old = _total([table.overdue & mask for table, mask in zip(tables, taken, strict=True)])
    ranked = policy.top_k and fit < dirty
    why = [f"top_k {_amount(policy)} takes those that have changed most"] if ranked else []
    why += [f"no more than {took} of {fit} fit max_bytes {policy.max_bytes}"] if took < fit else []
    why += [f"{new} were never sent before"] if new else []
    why += [f"{old} were older than max_age_seconds {policy.max_age_seconds:g}"] if old else []
    return f"took {took} of {dirty} dirty rows: {'; '.join(why)}"


def _total(masks: Sequence[Mask]) -> int:
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def _amount(policy: Policy) -> str:
    top_k = policy.top_k or 0.0
    amount = f"{100 * top_k:g} %" if top_k < 1 else f"{top_k:.15g}"
    return f"{amount} per table" if policy.top_k_per_table else amount
