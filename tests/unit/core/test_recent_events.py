"""The last events: numbers that only grow, also over restarts and clocks that are set back."""

from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.events import Event, EventKind, EventLog
from deltasync.core.recent_events import KEPT_EVENTS, RecentEvents


@given(st.lists(st.integers(0, 10**6), max_size=50), st.integers(0, 60))
def test_who_has_seen_some_is_given_the_rest(times: list[int], last: int) -> None:
    clock = iter([each * 1000 for each in times])
    recent = RecentEvents(lambda: "here", lambda: next(clock))
    for number in range(len(times)):
        recent.add(Event(EventKind.RANK_JOINED, {"rank": number}))
    everything = recent.after(0)
    assert [each.subject["rank"] for each in everything] == [str(number) for number in range(len(times))]
    numbers = [each.number for each in everything]
    assert numbers == sorted(set(numbers))
    assert recent.newest(last) == recent.after(recent.before(last)) == everything[max(0, len(times) - last) :]


def test_no_more_are_kept_and_what_is_only_for_faults_is_not() -> None:
    recent = RecentEvents(lambda: "here")
    log = EventLog(keep=recent.add)
    for number in range(KEPT_EVENTS + 10):
        log(Event(EventKind.REPLICA_JOINED, {"replica": str(number)}))
        log(Event(EventKind.CUT_SEALED, {"version": number}))
    assert len(recent.after(0)) == KEPT_EVENTS
    assert {each.event for each in recent.after(0)} == {"replica_joined"}


def test_who_is_too_slow_lacks_what_is_not_kept_any_more() -> None:
    recent = RecentEvents(lambda: "here")
    for number in range(KEPT_EVENTS):
        recent.add(Event(EventKind.RANK_JOINED, {"rank": number}))
    first, second, *_ = recent.after(0)
    assert not recent.lacks(recent.before(KEPT_EVENTS))
    for _ in range(2):
        recent.add(Event(EventKind.RANK_JOINED), repeats=3)
    assert recent.lacks(first.number)
    assert not recent.lacks(second.number)
    assert recent.newest(1)[0].repeats == 3


def test_what_peers_say_is_bounded() -> None:
    recent = RecentEvents(lambda: "here")
    recent.add(Event(EventKind.REPLICA_REFUSED, {"replica": "x\n" * 10_000}, "y\n" * 10_000))
    (found,) = recent.newest(1)
    assert len(found.subject["replica"]) <= 200
    assert len(found.text) <= 400
    assert found.text.isprintable()
