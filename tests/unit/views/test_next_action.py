"""What the loop of a view does next, and why: a decision of facts alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deltasync.core.policy import Policy
from deltasync.views.decision import PACE_VERSIONS, Action, Situation, next_action

SECOND = 10**9
NOW = 1_700_000_000 * SECOND


def situation(
    newest: int = 5,
    compared: int = 5,
    left: int = 0,
    *,
    left_since: float = 0.0,
    released: float = 0.0,
    sealed: Sequence[float] = (),
    ready: bool = True,
) -> Situation:
    """Times are seconds before now; `released` 0 is never."""
    return Situation(
        newest_version=newest,
        compared_version=compared,
        backlog_rows=left,
        oldest_dirty_ns=NOW - round(left_since * SECOND),
        released_ns=NOW - round(released * SECOND) if released else None,
        sealed_ns=[NOW - round(ago * SECOND) for ago in sealed],
        ready=ready,
    )


def seconds(now: Situation, interval: float = 0.0, age: float | None = None) -> float | None:
    return next_action(Policy(min_interval_seconds=interval, max_age_seconds=age), now, NOW).seconds


NEW = situation(newest=6)


@pytest.mark.parametrize(
    ("now", "action", "wait", "reason"),
    [
        (replace(NEW, paused=True, refused=True), Action.WAIT, None, "the consumer is paused"),
        (replace(NEW, connected=False, refused=True), Action.WAIT, None, "no replica is connected"),
        (replace(NEW, refused=True, follows="version 3"), Action.WRITE, 0, "the log refused the last release"),
        (replace(NEW, follows="version 3", fits=False), Action.FOLLOW, 0, "replicas are to hold version 3"),
        (
            replace(NEW, follows="version 3", arrived=True),
            Action.WAIT,
            None,
            "replicas get version 3 and nothing later",
        ),
        (replace(NEW, fits=False), Action.TABLES, 0, "the view lacks tables in the form of the policy"),
        # While tables cannot be made, rows of the others go out.
        (replace(NEW, fits=False, tables_after_seconds=3), Action.ROWS, 0, "version 6 is new"),
        (
            replace(situation(), fits=False, tables_after_seconds=3),
            Action.WAIT,
            3,
            "the policy's tables could not be made; nothing has changed since the last release",
        ),
        (NEW, Action.ROWS, 0, "version 6 is new"),
    ],
)
def test_pauses_refusals_kept_versions_and_tables_precede_rows(
    now: Situation, action: Action, wait: float | None, reason: str
) -> None:
    found = next_action(Policy(), now, NOW)
    assert (found.action, found.seconds, found.reason) == (action, wait, reason)


@pytest.mark.parametrize(
    ("now", "wait", "reason"),
    [
        (situation(newest=5, compared=4, released=0.001), 0.0, "version 5 is new"),
        (situation(newest=6, compared=5, left=3, released=0.001, sealed=[9, 6, 3]), 0.0, "version 6 is new"),
        (situation(left=7, released=1, sealed=[9, 6, 3]), 5.0, "7 rows are left from the last release"),
        (situation(released=1000), None, "nothing has changed since the last release"),
        *(
            (
                situation(newest=newest, left=left, released=1000, ready=False),
                None,
                "no connected replica holds the last release yet",
            )
            for newest, left in [(5, 0), (5, 9), (6, 0), (6, 9)]
        ),
    ],
)
def test_the_reason_why_rows_are_due_or_not(now: Situation, wait: float | None, reason: str) -> None:
    found = next_action(Policy(), now, NOW)
    assert (found.seconds, found.reason) == (wait, reason)


@pytest.mark.parametrize(
    ("now", "interval", "age", "wait"),
    [
        # A new version waits for the interval since the last release.
        *(
            (situation(newest=6, released=released), 10, None, wait)
            for released, wait in [(0, 0.0), (4, 6.0), (10, 0.0), (11, 0.0), (9.75, 0.25)]
        ),
        # Rows that were left wait for the longer of interval and pace, which is 6 s.
        (situation(left=7, released=1, sealed=[9, 6, 3]), 2, None, 5.0),
        (situation(left=7, released=1, sealed=[9, 6, 3]), 20, None, 19.0),
        # They go out once the oldest reaches the greatest age, but not within the interval.
        *(
            (situation(left=7, left_since=since, released=1, sealed=[9, 6, 3]), interval, 3, wait)
            for since, interval, wait in [
                *((0, 0, 3.0), (1, 0, 2.0), (3, 0, 0.0), (300, 0, 0.0), (300, 2, 1.0), (0, 2, 3.0)),
                (-3600, 0, 0.0),  # The clock went back.
            ]
        ),
        # A greatest age later than that changes nothing.
        (situation(left=7, released=1, sealed=[9, 6, 3]), 0, 100, 5.0),
        (situation(newest=6, left=7, left_since=900, released=1), 4, 5, 3.0),
        (situation(left=0, left_since=900, released=1), 0, 5, None),
        # A clock that went back does not let a release wait for it: else it would wait anew at each look.
        (situation(newest=6, released=-3600), 10, None, 0.0),
        (situation(left=4, released=-3600), 10, None, 0.0),
    ],
)
def test_how_long_a_release_waits(now: Situation, interval: float, age: float | None, wait: float | None) -> None:
    assert seconds(now, interval, age) == (wait if wait is None else pytest.approx(wait))


@pytest.mark.parametrize(
    ("sealed", "pause"),
    [
        ([9, 6, 3], 6.0),  # twice the time between versions
        ([9, 8, 5, 3], 4.0),  # the median of the times between them
        ([31, 10, 9, 8], 2.0),  # an outage among them
        ([], 0.1),
        ([7], 0.1),
        ([0.003, 0.002, 0.001], 0.1),  # a burst
        ([5, 5, 5], 0.1),
        ([9000, 5000, 1], 10.0),  # hours apart
        ([3, 6, 9], 0.1),  # the clock went back
        ([9000.0, *map(float, range(PACE_VERSIONS, 0, -1))], 2.0),  # the last versions only
    ],
)
def test_the_backlog_goes_out_at_the_pace_of_versions(sealed: list[float], pause: float) -> None:
    assert seconds(situation(left=7, released=0.001, sealed=sealed)) == pytest.approx(pause - 0.001)


@given(st.integers(3, PACE_VERSIONS), st.floats(0.06, 4.9), st.floats(0, 1e6), st.integers(0, PACE_VERSIONS))
def test_an_outage_does_not_change_the_pace(versions: int, between: float, outage: float, place: int) -> None:
    """Wherever it was, and however long: the tail goes out as fast as it would have."""
    sealed = [-number * between - (outage if number > place else 0) for number in range(versions)]
    assert seconds(situation(left=1, released=0.001, sealed=sealed)) == pytest.approx(
        2 * between - 0.001, abs=1e-6
    )


@given(
    newest=st.integers(0, 3),
    compared=st.integers(0, 3),
    left=st.integers(0, 2),
    left_since=st.floats(-1e5, 1e5),
    released=st.floats(-1e5, 1e5),
    sealed=st.lists(st.floats(-1e5, 1e5), max_size=12),
    ready=st.booleans(),
    interval=st.floats(0, 1e4),
    age=st.none() | st.floats(1e4, 1e5),
)
def test_a_due_release_waits_at_most_its_pause_whatever_the_clocks_say(
    newest: int,
    compared: int,
    left: int,
    left_since: float,
    released: float,
    sealed: list[float],
    ready: bool,
    interval: float,
    age: float | None,
) -> None:
    assume(compared <= newest)
    now = situation(newest, compared, left, left_since=left_since, released=released, sealed=sealed, ready=ready)
    wait = seconds(now, interval, age)
    assert (wait is not None) == (ready and (newest > compared or left > 0))
    if wait is not None:
        longest = interval if newest > compared else max(interval, 10.0)
        assert 0 <= wait <= longest


class Feed:
    """A consumer whose clock jumps to what comes next: each version adds two rows, a release takes `takes`."""

    def __init__(self, policy: Policy, sealed: list[int], takes: int) -> None:
        self._policy, self._sealed, self._takes = policy, sealed, takes
        self._clock, self.compared, self.left = NOW, 0, 0
        self.releases: list[tuple[int, int]] = []

    def run(self) -> None:
        """Until nothing is due any more."""
        while (at := self._next()) is not None:
            self._clock = at

    def _next(self) -> int | None:
        newest = sum(at <= self._clock for at in self._sealed)
        wait = next_action(self._policy, self._situation(newest), self._clock).seconds
        if wait == 0:
            self.left = max(0, self.left + 2 * (newest - self.compared) - self._takes)
            self.compared = newest
            self.releases.append((self._clock, newest))
            return self._clock
        ahead = self._sealed[newest : newest + 1]
        if wait is not None:
            ahead.append(self._clock + max(1, round(wait * SECOND)))
        return min(ahead, default=None)

    def _situation(self, newest: int) -> Situation:
        return Situation(
            newest_version=newest,
            compared_version=self.compared,
            backlog_rows=self.left,
            oldest_dirty_ns=self._clock,
            released_ns=self.releases[-1][0] if self.releases else None,
            sealed_ns=self._sealed[:newest],
            ready=True,
        )


@given(st.lists(st.integers(1, 5 * SECOND), min_size=1, max_size=12), st.integers(0, 4), st.integers(1, 24))
def test_each_version_or_interval_gets_one_release(gaps: list[int], interval: int, takes: int) -> None:
    sealed = [NOW + after for after in accumulate(gaps)]
    feed = Feed(Policy(min_interval_seconds=interval), sealed, takes)
    feed.run()
    assert (feed.compared, feed.left) == (len(sealed), 0)
    assert all(later[0] - earlier[0] >= interval * SECOND for earlier, later in pairwise(feed.releases))
    first_at = {newest: at for at, newest in reversed(feed.releases)}
    if not interval:
        assert first_at == dict(enumerate(sealed, start=1))
    if takes >= 2 * len(sealed):
        assert len(feed.releases) == len(first_at)
    assert len(feed.releases) <= 2 * len(sealed)
