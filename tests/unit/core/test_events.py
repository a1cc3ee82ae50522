"""What happens is told once, to all who listen, and the log says it in one line."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.errors import StorageFailed
from deltasync.core.events import Event, EventCounts, EventKind, Events, line_of, log_event


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
    assert line_of(event) == "rank joined: model=clicks rank=3 it is the first"
    failed = Event(EventKind.FAILED, {"consumer": "c"}, "tried again", StorageFailed("no room"))
    assert line_of(failed) == "failed: consumer=c tried again: no room"
    unforeseen = Event(EventKind.FAILED, {"consumer": "c"}, error=KeyError("x"))
    assert line_of(unforeseen) == "failed: consumer=c KeyError: 'x'"


@given(st.text(), st.text())
def test_what_peers_say_stays_one_line_of_bounded_length(name: str, text: str) -> None:
    line = line_of(Event(EventKind.REPLICA_REFUSED, {"replica": name}, text * 1000))
    assert line.isprintable()
    assert len(line) < 500


def test_only_what_was_not_foreseen_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "deltasync"):
        for error in (StorageFailed("no room"), KeyError("x")):
            log_event(Event(EventKind.FAILED, error=error))
    foreseen, unforeseen = caplog.records
    assert foreseen.exc_info is None
    assert unforeseen.exc_info
    assert {each.levelno for each in caplog.records} == {logging.ERROR}


def test_kinds_are_names_of_metrics() -> None:
    assert all(kind.value.replace("_", "").isalpha() and kind.value.islower() for kind in EventKind)
