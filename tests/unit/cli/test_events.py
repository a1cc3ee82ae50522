"""Events that are followed: each is shown once, of several processes too, and after a restart."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import ServiceUnavailable
from deltasync.cli.events import event_line, follow_events, may_lack, unseen
from deltasync.client import Endpoint
from deltasync.client.admin import EachProcess

HERE = Endpoint("http://here:1")

_Numbers = st.lists(st.integers(1, 10**6), unique=True, max_size=30).map(sorted)


def _event(process: str, number: int) -> dict[str, Any]:
    return {"process": process, "number": number, "unix_ns": number}


@given(
    st.dictionaries(st.sampled_from(["", "sync-0", "sync-1"]), _Numbers), st.lists(st.integers(0, 30), max_size=5)
)
def test_each_is_shown_once_however_often_asked(numbers: dict[str, list[int]], ends: list[int]) -> None:
    seen, shown = dict[str, int](), list[dict[str, Any]]()
    for end in [*sorted(ends), 30, 30]:
        shown += unseen([_event(name, each) for name, those in numbers.items() for each in those[:end]], seen)
    for name, those in numbers.items():
        assert [each["number"] for each in shown if each["process"] == name] == those


@pytest.mark.parametrize("last", [0, 1, 3])
def test_who_follows_is_shown_some_of_before_and_all_that_come(
    last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = [_event("sync-0", each) for each in (1, 3)], [_event("sync-1", 2)]
    later = [_event("sync-1", 4), _event("sync-2", 5)]
    before = [one[0], *other, one[1]]
    answers = iter([None, before, [], [*before, *later]])

    class Answering(EachProcess):
        def answers(self, path: str, *_: Any, **__: Any) -> list[Any]:
            found = next(answers)
            if found is None:
                raise ServiceUnavailable("no")
            return [found]

    with pytest.raises(StopIteration):
        follow_events(lambda: Answering(HERE), last, as_json=True, pause=lambda: None)
    out, said = capsys.readouterr()
    assert said.count("does not answer") == 1
    assert [json.loads(line)["number"] for line in out.splitlines()] == [1, 2, 3, 4, 5][3 - last :]


@given(
    st.dictionaries(st.sampled_from(["", "sync-0", "sync-1"]), _Numbers),
    st.lists(st.integers(0, 30), min_size=2, max_size=5),
    st.integers(1, 5),
)
def test_few_are_asked_for_as_long_as_they_go_back_to_those_seen(
    numbers: dict[str, list[int]], ends: list[int], few: int
) -> None:
    def last(end: int, most: int) -> list[dict[str, Any]]:
        return [_event(name, each) for name, those in numbers.items() for each in those[:end][-most:]]

    seen, shown = dict[str, int](), list[dict[str, Any]]()
    unseen(last(min(ends), 30), seen)
    for end in sorted(ends):
        found = last(end, few)
        shown += unseen(last(end, 30) if may_lack(found, seen, few) else found, seen)
    for name, those in numbers.items():
        assert [each["number"] for each in shown if each["process"] == name] == those[min(ends) : max(ends)]
    assert not may_lack(last(max(ends), few), seen, few)


def test_who_follows_asks_for_few_and_for_all_where_many_have_come(capsys: pytest.CaptureFixture[str]) -> None:
    events, paths = [_event("", each) for each in range(1, 401)], list[str]()
    heads = iter([100, 101, 300, 300, 310])
    head = [next(heads)]

    class Answering(EachProcess):
        def answers(self, path: str, *_: Any, **__: Any) -> list[Any]:
            paths.append(path)
            if head[0] >= 300:
                self.missing["sync-1"] = "it is gone"
            return [events[: head[0]][-int(path.rpartition("=")[2]) :]]

    def pause() -> None:
        head[0] = next(heads)

    with pytest.raises(StopIteration):
        follow_events(lambda: Answering(HERE), 3, as_json=True, pause=pause)
    out, said = capsys.readouterr()
    assert said.count("sync-1") == 1
    assert [json.loads(line)["number"] for line in out.splitlines()] == list(range(98, 311))
    assert [path.rpartition("=")[2] for path in paths] == ["50", "50", "50", "1000", "50", "50"]


def test_events_of_a_restarted_process_are_shown_if_its_clock_went_back() -> None:
    seen = {"sync-0": 500, "sync-1": 700}
    found = [_event("sync-0", 3), _event("sync-1", 700), _event("sync-1", 701)]
    assert unseen(found, seen) == [found[0], found[2]]
    assert unseen(found, seen) == []


def test_a_line_names_the_process_where_there_are_several() -> None:
    event = {"unix_ns": 0, "level": "info", "event": "rank_joined", "subject": {"rank": "0"}, "text": "it is new"}
    assert event_line({**event, "process": ""}).endswith("rank joined: rank=0 it is new")
    assert event_line({**event, "process": "sync-1"}).endswith("rank joined: process=sync-1 rank=0 it is new")
