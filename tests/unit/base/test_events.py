"""What happens is told once, to all who listen; the log says it in one line, and the last events are kept."""

import logging
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import StorageFailed
from deltasync.base.events import (
    KEPT_EVENTS,
    Event,
    EventCounts,
    EventKind,
    EventLog,
    Events,
    RecentEvents,
    event_line,
)


def test_all_who_listen_are_told() -> None:
    heard, counts = list[Event](), EventCounts()
    events = Events(heard.append, counts)
    events.emit(EventKind.RANK_JOINED, "it is the first", model="clicks", rank=3)
    events.emit(EventKind.RANK_JOINED)
    events.emit(EventKind.FAILED, "later", error := StorageFailed("no room"), model="clicks")
    assert [each.kind for each in heard] == [EventKind.RANK_JOINED, EventKind.RANK_JOINED, EventKind.FAILED]
    assert heard[0] == Event(EventKind.RANK_JOINED, {"model": "clicks", "rank": 3}, "it is the first")
    assert heard[2].error is error
    assert counts == {EventKind.RANK_JOINED: 2, EventKind.FAILED: 1}


def test_a_line_names_what_happened_to_whom_and_why() -> None:
    event = Event(EventKind.RANK_JOINED, {"model": "clicks", "rank": 3}, "it is the first")
    assert event_line(event) == "rank joined: model=clicks rank=3 it is the first"
    failed = Event(EventKind.FAILED, {"consumer": "c"}, "tried again", StorageFailed("no room"))
    assert event_line(failed) == "failed: consumer=c tried again: no room"
    unforeseen = Event(EventKind.FAILED, {"consumer": "c"}, error=KeyError("x"))
    assert event_line(unforeseen) == "failed: consumer=c KeyError: 'x'"


@given(st.text(), st.text())
def test_what_peers_say_stays_one_line_of_bounded_length(name: str, text: str) -> None:
    line = event_line(Event(EventKind.REPLICA_REFUSED, {"replica": name}, text * 1000))
    assert line.isprintable()
    assert len(line) < 500


def test_only_what_was_not_foreseen_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "deltasync"):
        for error in (StorageFailed("no room"), KeyError("x")):
            EventLog()(Event(EventKind.FAILED, error=error))
    foreseen, unforeseen = caplog.records
    assert foreseen.exc_info is None
    assert unforeseen.exc_info
    assert {each.levelno for each in caplog.records} == {logging.ERROR}


def test_kinds_are_names_of_metrics() -> None:
    assert all(kind.label.replace("_", "").isalpha() for kind in EventKind)


def test_repeated_trouble_is_logged_once_a_minute_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    now, kept = [0.0], list[tuple[str, int]]()
    log = EventLog(lambda: now[0], lambda event, repeats: kept.append((event.text, repeats)))
    refused = [Event(EventKind.PUBLISHER_REFUSED, {"model": "m"}, f"run {each} began before") for each in "ab"]
    for second in (0, 5, 59, 60, 119):
        now[0] = float(second)
        for event in refused:
            log(event)
    said = [event_line(event) for event in refused]
    more = " (2 more like it since the last one)"
    assert [each.getMessage() for each in caplog.records] == [*said, *(line + more for line in said)]
    assert kept == [(event.text, repeats) for repeats in (0, 2) for event in refused]


def test_what_fails_again_with_other_numbers_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Free bytes, say, differ with each try."""
    log = EventLog()
    for model in ("m1", "m2"):
        for free in (7, 42):
            error = StorageFailed(f"{free} are free")
            log(Event(EventKind.FAILED, {"model": model}, "it waits", error))
    assert caplog.messages == [f"failed: model={each} it waits: 7 are free" for each in ("m1", "m2")]


def test_what_may_come_again_keeps_no_error_with_its_traceback() -> None:
    """Which holds what the call has held: a release, with its room."""
    log, gone = EventLog(), list[weakref.ref[StorageFailed]]()
    for _ in range(2):
        error = StorageFailed("no room")
        gone.append(weakref.ref(error))
        log(Event(EventKind.FAILED, {"model": "m"}, "a cut", error))
        del error
    assert [each() for each in gone] == [None, None]


def test_refused_calls_are_written_down_by_the_audit_alone(caplog: pytest.LogCaptureFixture) -> None:
    kept = list[Event]()
    log = EventLog(keep=lambda event, _: kept.append(event))
    log(Event(EventKind.CALL_REFUSED))
    log(Event(EventKind.CALL_REFUSED, {"call": "Subscribe", "address": "10.0.0.7:1"}, "no role"))
    assert [event.text for event in kept] == ["no role"]
    assert caplog.records == []


def test_the_log_remembers_no_more_than_some_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(lambda: 0.0)
    refused = [Event(EventKind.REPLICA_REFUSED, {"replica": each}) for each in range(1001)]
    for event in [*refused, refused[-1], refused[0]]:
        log(event)
    assert len(caplog.records) == 1002  # The oldest was forgotten.
    other = Event(EventKind.REPLICA_REPLACED, {"replica": 1})
    log(other)
    log(other)
    assert len(caplog.records) == 1004


def test_versions_in_quarantine_have_a_line_a_model_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(lambda: 0.0)
    for version in (2, 3, 4):
        for model in ("a", "b"):
            log(Event(EventKind.CUT_QUARANTINED, {"model": model, "version": version}, f"row {version} has norm"))
    assert [record.args for record in caplog.records] == [
        (f"cut quarantined: model={model} version=2 row 2 has norm",) for model in ("a", "b")
    ]


def test_a_rank_whose_cuts_are_refused_has_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(lambda: 0.0)
    with caplog.at_level(logging.INFO, "deltasync"):
        for free in range(3):
            log(Event(EventKind.RANK_LEFT, {"rank": 0}, error=StorageFailed(f"no room, {free} bytes are free")))
        for _ in range(2):
            log(Event(EventKind.RANK_LEFT, {"rank": 0}, "it has finished"))
    finished = "rank left: rank=0 it has finished"
    assert caplog.messages == ["rank left: rank=0 no room, 0 bytes are free", finished, finished]


# The last events: their numbers only grow, also over restarts and clocks that are set back.


@given(st.lists(st.integers(0, 10**6), max_size=50), st.integers(0, 60))
def test_who_has_seen_some_is_given_the_rest(times: list[int], last: int) -> None:
    clock = iter([each * 1000 for each in times])
    recent = RecentEvents("here", lambda: next(clock))
    for number in range(len(times)):
        recent.add(Event(EventKind.RANK_JOINED, {"rank": number}))
    everything = recent.after(0)
    assert [each.subject["rank"] for each in everything] == [str(number) for number in range(len(times))]
    numbers = [each.number for each in everything]
    assert numbers == sorted(set(numbers))
    assert recent.newest(last) == recent.after(recent.before(last)) == everything[max(0, len(times) - last) :]


def test_no_more_are_kept_and_what_is_only_for_faults_is_not() -> None:
    recent = RecentEvents("here")
    log = EventLog(keep=recent.add)
    for number in range(KEPT_EVENTS + 10):
        log(Event(EventKind.REPLICA_JOINED, {"replica": str(number)}))
        log(Event(EventKind.CUT_SEALED, {"version": number}))
    assert len(recent.after(0)) == KEPT_EVENTS
    assert {each.event for each in recent.after(0)} == {"replica_joined"}


def test_who_is_too_slow_lacks_what_is_not_kept_any_more() -> None:
    recent = RecentEvents("here")
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
    recent = RecentEvents("here")
    recent.add(Event(EventKind.REPLICA_REFUSED, {"replica": "x\n" * 10_000}, "y\n" * 10_000))
    (found,) = recent.newest(1)
    assert len(found.subject["replica"]) <= 200
    assert len(found.text) <= 400
    assert found.text.isprintable()
