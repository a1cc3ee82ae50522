"""Decide when a consumer's next release is due, and why. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from deltasync.base.words import are
from deltasync.core.policy import Policy

# Bounds of the pause between releases without a new version, since versions may come in a burst or hours apart.
_SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 10.0
# Number of newest versions from which to estimate their pace.
PACE_VERSIONS = 8


@dataclass(frozen=True)
class Due:
    """Seconds until a release is due (0 = now; None = wait for an event), and the reason."""

    seconds: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts for the decision. Times are nanoseconds by `steady_ns`.

    Attributes:
        newest_version: the model's newest version.
        compared_version: the version at which rows were last picked for a release.
        backlog_rows: dirty rows that were left at that version.
        oldest_dirty_ns: seal time of the version since which the oldest of these rows is dirty.
        released_ns: when the last release was made; None = never.
        sealed_ns: when the last few versions were sealed, oldest first.
        ready: whether a connected replica holds the last release.
    """

    newest_version: int
    compared_version: int
    backlog_rows: int
    oldest_dirty_ns: int
    released_ns: int | None
    sealed_ns: Sequence[int]
    ready: bool


def due(policy: Policy, now: Situation, now_ns: int) -> Due:
    """Decide when the next release is due.

    Each new version gets one release, no sooner than the policy's minimum interval after the last one. Without a
    new version, rows of the backlog go out at the pace at which versions came, or once the oldest reaches the
    policy's maximum age. No release is made until a connected replica holds the last one, because it would get
    both at once anyway.
    """
    if not now.ready:
        return Due(None, "no connected replica holds the last release yet")
    if now.newest_version == now.compared_version and not now.backlog_rows:
        return Due(None, "nothing has changed since the last release")
    at_once = _wait(policy.min_interval_seconds, now.released_ns, now_ns)
    if now.newest_version != now.compared_version:
        return Due(at_once, f"version {now.newest_version} is new")
    paced = _wait(_pace(now.sealed_ns), now.released_ns, now_ns)
    if policy.max_age_seconds is not None:
        paced = min(paced, _wait(policy.max_age_seconds, now.oldest_dirty_ns, now_ns))
    return Due(max(at_once, paced), f"{are(now.backlog_rows, 'row')} left from the last release")


def _wait(seconds: float, since_ns: int | None, now_ns: int) -> float:
    """The rest of a pause; 0 if it seems to begin in the future, because the clock was set back."""
    if since_ns is None:
        return 0.0
    waited = (now_ns - since_ns) / 1e9
    return max(0.0, seconds - waited) if waited >= 0 else 0.0


def _pace(sealed_ns: Sequence[int]) -> float:
    """Twice the median time between recent versions, within bounds. One outage does not change the median."""
    recent = sealed_ns[-PACE_VERSIONS:]
    if len(recent) < 2:
        return _SHORTEST_SECONDS
    between = median_low(later - earlier for earlier, later in pairwise(recent)) / 1e9
    return min(max(2 * between, _SHORTEST_SECONDS), LONGEST_SECONDS)
