"""Decide when a consumer's next release is due, and which rows it takes. Pure functions that return a reason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.base.words import are, counted
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, Mask
from deltasync.kernels.dirty_rows import rank_rows, take_largest

Floats = NDArray[np.float64]
Ranks = NDArray[np.uint64]
N = TypeVar("N", bound=np.generic)

# Number of newest versions from which to estimate their pace.
PACE_VERSIONS = 8


@dataclass(frozen=True)
class ReleaseOptions:
    """How often releases are made, and for how long cuts wait for one.

    Attributes:
        shortest_seconds: shortest pause between releases without a new version; versions may come in a burst.
        longest_seconds: longest such pause; versions may come hours apart.
        retry_seconds: pause before the next attempt to make the tables of a policy.
        turn_seconds: a cut waits for at most this time and one block.
        copied_bytes: size of a block of rows that are copied into new tables.
        compared_bytes: size of a block of rows that are compared, which is faster.
        updated_bytes: size of a block of rows that are updated.
        known_releases: number of newest releases whose version and seal are kept.
    """

    shortest_seconds: float = 0.1
    longest_seconds: float = 10.0
    retry_seconds: float = 10.0
    turn_seconds: float = 0.01
    copied_bytes: int = 2 << 20
    compared_bytes: int = 64 << 20
    updated_bytes: int = 1 << 20
    known_releases: int = 10_000


RELEASE_OPTIONS = ReleaseOptions()


class Action(Enum):
    """What the loop of a view does next."""

    WAIT = "wait"
    WRITE = "write the refused release again"
    FOLLOW = "bring replicas to the kept version"
    TABLES = "make the tables of the policy"
    ROWS = "release rows"


@dataclass(frozen=True)
class NextAction:
    """The next action, and why. `seconds`: until the next look; 0 = act now; None = wait for an event."""

    action: Action
    seconds: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts about a view for the decision. Times are nanoseconds by `steady_ns`."""

    newest_version: int
    compared_version: int  # At which rows were last picked for a release.
    backlog_rows: int  # Dirty rows that were left at that version.
    oldest_dirty_ns: int  # Seal time of the version since which the oldest of these rows is dirty.
    released_ns: int | None  # When the last release was made; None = never.
    sealed_ns: Sequence[int]  # When the last few versions were sealed, oldest first.
    ready: bool  # A connected replica holds the last release.
    paused: bool = False
    connected: bool = True  # A replica is.
    refused: bool = False  # The log refused the last release.
    follows: str = ""  # The kept version that replicas are to hold, in words; empty = the newest version.
    arrived: bool = False  # The view has that version, in the policy's form.
    fits: bool = True  # The view has the tables of the policy, in the policy's form.
    tables_after_seconds: float = 0.0  # Until these tables are tried again, because they could not be made.


def next_action(
    policy: Policy, now: Situation, now_ns: int, options: ReleaseOptions = RELEASE_OPTIONS
) -> NextAction:
    """Decide what to do next for a consumer's view.

    A release that the log refused comes first, because the tables already have its rows. Then come the kept
    version or the tables of the policy, then rows.
    """
    if now.paused:
        return NextAction(Action.WAIT, None, "the consumer is paused")
    if not now.connected:
        return NextAction(Action.WAIT, None, "no replica is connected")
    if now.refused:
        return NextAction(Action.WRITE, 0, "the log refused the last release")
    if now.follows:
        if now.arrived:
            return NextAction(Action.WAIT, None, f"replicas get {now.follows} and nothing later")
        return NextAction(Action.FOLLOW, 0, f"replicas are to hold {now.follows}")
    rows = _due(policy, now, now_ns, options)
    if now.fits:
        return rows
    if now.tables_after_seconds <= 0:
        return NextAction(Action.TABLES, 0, "the view lacks tables in the form of the policy")
    if rows.seconds is None or rows.seconds > now.tables_after_seconds:
        reason = f"the policy's tables could not be made; {rows.reason}"
        return NextAction(Action.WAIT, now.tables_after_seconds, reason)
    return rows


def _due(policy: Policy, now: Situation, now_ns: int, options: ReleaseOptions) -> NextAction:
    """Decide when rows of the present tables are due.

    Each new version gets one release, after the policy's minimum interval. Without a new version, the backlog goes
    out at the pace at which versions came, or once its oldest row reaches the policy's maximum age. A replica that
    lacks the last release would get both at once, so none is made until a connected replica holds it.
    """
    if not now.ready:
        return NextAction(Action.WAIT, None, "no connected replica holds the last release yet")
    if now.newest_version == now.compared_version and not now.backlog_rows:
        return NextAction(Action.WAIT, None, "nothing has changed since the last release")
    seconds = _wait(policy.min_interval_seconds, now.released_ns, now_ns)
    reason = f"version {now.newest_version} is new"
    if now.newest_version == now.compared_version:
        paced = _wait(_pace(now.sealed_ns, options), now.released_ns, now_ns)
        if policy.max_age_seconds is not None:
            paced = min(paced, _wait(policy.max_age_seconds, now.oldest_dirty_ns, now_ns))
        seconds, reason = max(seconds, paced), f"{are(now.backlog_rows, 'row')} left from the last release"
    return NextAction(Action.WAIT if seconds else Action.ROWS, seconds, reason)


def _wait(seconds: float, since_ns: int | None, now_ns: int) -> float:
    """The rest of a pause; 0 if it seems to begin in the future, because the clock was set back."""
    if since_ns is None:
        return 0.0
    waited = (now_ns - since_ns) / 1e9
    return max(0.0, seconds - waited) if waited >= 0 else 0.0


def _pace(sealed_ns: Sequence[int], options: ReleaseOptions) -> float:
    """Twice the median time between recent versions, within bounds. One outage does not change the median."""
    between = [later - earlier for earlier, later in pairwise(sealed_ns[-PACE_VERSIONS:])]
    pace = 2 * median_low(between) / 1e9 if between else 0.0
    return min(max(pace, options.shortest_seconds), options.longest_seconds)


_ONE = np.ones(1, np.int64)


@dataclass(frozen=True)
class DirtyRows:
    """The dirty rows of one table, as columns [n] sorted by id.

    Attributes:
        norms: L2 norms of the deltas, the model's row minus the replicas' row; never NaN.
        never_sent: whether no replica ever got the row.
        overdue: whether the row has been dirty for longer than the policy's maximum age.
        forced: whether every policy sends the row at once: unranked rows, deletes, and rows whose id has changed.
        row_bytes: size of one row in a release.
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


def pick(
    tables: Sequence[DirtyRows],
    policy: Policy,
    rest_after: int = 0,
    *,
    kept: int = 0,
    at_once: bool = False,
    new_tables: Sequence[int] = (),
) -> Pick:
    """Choose the rows of the next release: all forced rows, and the others as the policy allows.

    The others are ranked: rows that were never sent come first, then larger norms of the delta; ties go by table
    and row id. The release takes the first `top_k` rows and all overdue ones. If they exceed `max_bytes`, it takes
    overdue rows first, then the others by rank, but at least one row.

    Args:
        rest_after: number of rows of the last release, if no version has come since; otherwise 0. A share takes at
            least this number, so that the rest goes out in a few equal releases.
        kept: the kept version that replicas are to hold exactly; nothing limits its release. 0 = none.
        at_once: whether a run or a rollback has begun, whose rows fit only each other; nothing limits them either.
        new_tables: numbers of rows of the tables that the release creates.
    """
    if kept or at_once:
        policy = replace(policy, top_k=None, top_k_per_table=False, max_bytes=None)
    taken, reason = _pick_dirty(tables, policy, rest_after)
    if kept:
        return Pick(taken, f"brings replicas to kept version {kept}")
    if new_tables:
        rows, created = counted(sum(new_tables), "row"), counted(len(new_tables), "table")
        whole = f"took all {rows} of {created} that the replicas did not have in this form"
        reason = f"{whole}; and {reason}" if any(len(mask) for mask in taken) else whole
    return Pick(taken, f"{reason}, after a new run or a rollback" if at_once else reason)


def _pick_dirty(tables: Sequence[DirtyRows], policy: Policy, rest_after: int) -> tuple[list[Mask], str]:
    if not any(len(table.ids) for table in tables):
        return [np.zeros(0, np.bool_) for _ in tables], "took all 0 dirty rows"
    rows = _Candidates(tables)
    wanted = rows.overdue | rows.top(policy, rest_after)
    taken = wanted if policy.max_bytes is None else rows.within(wanted, policy.max_bytes)
    reason, forced = rows.reason(wanted, taken, policy, rest_after), _count(rows.forced)
    if forced:
        taken, reason = taken | rows.forced, f"{reason}; and {forced} that every policy sends at once"
    return np.split(taken, rows.ends), reason


class _Candidates:
    """The dirty rows of all tables, one table after the other: columns [n].

    `free` rows are those to which the policy applies. `sizes` has one element if all rows have the same size.
    """

    def __init__(self, tables: Sequence[DirtyRows]) -> None:
        self.norms, self.never_sent = (
            _joined([each.norms for each in tables]),
            _joined([each.never_sent for each in tables]),
        )
        self.forced = _joined([each.forced for each in tables])
        self.free, self.overdue = ~self.forced, _joined([each.overdue for each in tables]) & ~self.forced
        lengths = [len(each.ids) for each in tables]
        self.ends = np.cumsum(lengths)[:-1]
        sizes = np.array([each.row_bytes for each in tables], np.int64)
        self.sizes = np.repeat(sizes, lengths) if (sizes != sizes[0]).any() else sizes[:1]

    @cached_property
    def ranks(self) -> Ranks:
        """[n] The first rows have the largest. Only policies with a limit need them."""
        ranks = np.empty(len(self.norms), np.uint64)
        rank_rows(self.norms.view(np.uint64), self.never_sent, ranks)
        return ranks

    def top(self, policy: Policy, rest_after: int) -> Mask:
        """The first rows of the ranking, over all tables or in each."""
        if policy.top_k is None:
            return self.free
        top_k = policy.top_k
        if top_k < 1 and rest_after:
            top_k = max(top_k, rest_after / max(_count(self.free), rest_after))
        ends = self.ends if policy.top_k_per_table else self.ends[:0]
        groups = np.split(self.ranks, ends), np.split(self.free, ends)
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
        return take_largest(self.ranks, _ONE, wanted, 1) if least and not taken.any() else taken

    def _bytes(self, rows: Mask) -> int:
        return _count(rows) * int(self.sizes[0]) if len(self.sizes) == 1 else int(self.sizes.sum(where=rows))

    def reason(self, wanted: Mask, taken: Mask, policy: Policy, rest_after: int) -> str:
        dirty, took, fit = _count(self.free), _count(taken), _count(wanted)
        if took == dirty:
            return f"took all {counted(dirty, 'dirty row')}"
        new, old = _count(self.never_sent & taken), _count(self.overdue & taken)
        ranked = policy.top_k and fit < dirty
        top_k = policy.top_k or 0.0
        amount = f"{100 * top_k:g} %" if top_k < 1 else f"{top_k:.15g}"
        amount += " per table" if policy.top_k_per_table else ""
        why = [f"top_k {amount} takes those that have changed most"] if ranked else []
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
    return free if count >= rows else take_largest(ranks, _ONE, free, count)


def _joined(parts: Sequence[NDArray[N]]) -> NDArray[N]:
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))
