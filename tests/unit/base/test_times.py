"""Times: since when a number is the newest, how old the newest event is, and where the time of cuts goes."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.base.clock import FOREVER_NS, Succession, steady_ns
from deltasync.base.errors import InvalidInput
from deltasync.core import cut_times as module
from deltasync.core.cut_times import KEPT_CUTS, CutTimes, RecentCuts, way_to_service
from deltasync.core.seal import check_event_time, event_time_of, newest_event_time, seconds_behind


def succession(*times: tuple[int, int]) -> Succession:
    made = Succession()
    for number, at_ns in times:
        made.add(number, at_ns)
    return made


def test_a_number_is_the_newest_until_there_is_a_later_one() -> None:
    numbers = succession((3, 100), (5, 200), (6, 300))
    assert [numbers.behind_ns(number, 1000) for number in (3, 4, 5, 6, 7)] == [800, 800, 700, 0, 0]
    assert [numbers.age_ns(number, 1000) for number in (3, 5, 6)] == [900, 800, 700]


def test_the_time_of_a_successor_is_unknown_before_the_first_entry() -> None:
    numbers = succession((3, 100), (5, 200))
    assert numbers.behind_ns(2, 1000) == FOREVER_NS
    assert {numbers.age_ns(number, 1000) for number in (2, 4, 6)} == {FOREVER_NS}
    assert succession().behind_ns(2, 1000) == 0


def test_of_what_was_found_at_the_start_it_is_not_known_when_it_came() -> None:
    numbers = succession((3, -FOREVER_NS), (5, 200))
    assert (numbers.since_ns(3), numbers.seconds_since(3, 1000)) == (None, None)
    assert numbers.since_ns(5) == 200


def test_repeating_a_number_changes_nothing() -> None:
    numbers = succession((3, 100), (3, 200), (2, 300))
    assert (numbers.age_ns(3, 1000), numbers.behind_ns(3, 1000)) == (900, 0)


def test_an_age_is_never_negative() -> None:
    numbers = succession((3, -FOREVER_NS), (5, 2 * 10**9))
    assert [numbers.seconds_since(5, now_ns) for now_ns in (10**9, 2 * 10**9, 3 * 10**9)] == [0, 0, 1]


def test_what_is_no_longer_remembered_is_not_known() -> None:
    for count in range(19_990, 20_010):  # Those that were the newest long ago are forgotten many at once.
        numbers = succession(*((number, number) for number in range(count)))
        assert numbers.behind_ns(count - 10, 30_000) == 30_000 - (count - 9)
        assert numbers.age_ns(count - 10_000, 30_000) == 30_000 - (count - 10_000)
        assert numbers.behind_ns(count - 20_001, 30_000) == FOREVER_NS


def test_the_clock_goes_on_while_the_machine_sleeps() -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before <= steady_ns() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# What is known of the newest event: nothing, or a time; a clock that is ahead makes no negative age.

SECOND = 10**9


def test_the_newest_of_those_who_know_counts() -> None:
    assert newest_event_time([3, None, 5, 4]) == 5
    assert newest_event_time([None, None]) is None
    assert newest_event_time([]) is None


@pytest.mark.parametrize("time", [0, -1, 2**63, 1.5, True, "1", np.float64(3.0)])
def test_what_is_no_time_is_refused(time: Any) -> None:
    with pytest.raises(InvalidInput, match=r"event_time_unix_ns: .*, expected whole nanoseconds since 1970"):
        check_event_time(time)


@pytest.mark.parametrize("time", [None, 1, 2**63 - 1, np.int64(7)])
def test_what_is_a_time_or_none_is_taken(time: Any) -> None:
    check_event_time(time)


def test_age_is_in_seconds_and_never_negative() -> None:
    assert seconds_behind(2 * SECOND, 5 * SECOND + SECOND // 2) == 3.5
    assert seconds_behind(5 * SECOND, 2 * SECOND) == 0.0
    assert seconds_behind(None, SECOND) is None


def test_the_event_time_of_a_version_is_that_of_its_own_seal() -> None:
    seals = [sealed(4, event_time_unix_ns=40), sealed(5), sealed(6, event_time_unix_ns=60)]
    assert [event_time_of(version, seals) for version in (4, 5, 6)] == [40, None, 60]
    assert [event_time_of(version, seals) for version in (0, 3, 7)] == [None, None, None], "no seal, no guess"
    assert event_time_of(1, []) is None


# Where the time of cuts goes: beside a plain list of what happened.

NOW = 10**15


def cuts(count: int) -> RecentCuts:
    recent = RecentCuts()
    for version in range(1, count + 1):
        recent.add(CutTimes(sealed(version), NOW, {"gather": 0.1, "send": 0.2, "seal": 0.0, "log": 0.3}))
    return recent


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_each_replica_counts_once_for_each_version_that_it_gets(acks: list[tuple[str, int, int]]) -> None:
    recent, wanted = cuts(8), dict[tuple[str, int], int]()
    for consumer, before, upto in acks:
        recent.deliver(consumer, before, upto, NOW)
        for version in range(before + 1, upto + 1):
            wanted[consumer, version] = wanted.get((consumer, version), 0) + 1
    found = {
        (consumer, cut.seal.version): each.replicas
        for cut in recent.newest()
        for consumer, each in cut.deliveries.items()
    }
    assert found == wanted


def test_a_version_shows_its_slowest_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = cuts(1)
    for sent, now in ((1.0, 1.5), (3.0, 3.25), (2.0, 2.1)):
        monkeypatch.setattr(module, "steady_ns", lambda now=now: NOW + int(now * 1e9))
        recent.deliver("c", 0, 1, NOW + int(sent * 1e9))
    (cut,) = recent.newest()
    found = cut.deliveries["c"]
    assert (found.replicas, found.release, found.ack) == (3, 3.0, 0.25)


def test_versions_of_before_a_stream_do_not_count() -> None:
    recent = cuts(2)
    recent.add(CutTimes(sealed(3), NOW + 10))
    recent.deliver("c", 0, 3, NOW + 20, begun_ns=NOW + 5)
    assert [cut.seal.version for cut in recent.newest() if cut.deliveries] == [3]


def test_only_the_last_ones_are_kept_and_all_are_counted() -> None:
    recent = cuts(KEPT_CUTS + 5)
    assert [each.seal.version for each in recent.newest(2)] == [KEPT_CUTS + 5, KEPT_CUTS + 4]
    assert len(recent.newest()) == KEPT_CUTS
    assert sum(recent.durations["log"].read()[0]) == KEPT_CUTS + 5
    recent.note_applied(KEPT_CUTS + 5)
    recent.note_applied(KEPT_CUTS + 5)  # Again, after an error.
    assert sum(recent.durations["apply"].read()[0]) == 1


@given(st.integers(0, 2**63), st.integers(-(2**62), 2**62))
def test_clocks_that_differ_make_no_part_negative(gather: int, arrived: int) -> None:
    found = way_to_service(gather, arrived)
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(max(0, arrived) / 1e9)
