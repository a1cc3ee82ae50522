"""What is said while a service does what it was asked for."""

import threading
from typing import Any

import click
import pytest

from deltasync.cli import waiting
from deltasync.client import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import ServiceUnavailable

SERVICE = Endpoint("http://127.0.0.1:1")


class Said:
    """The lines that were said, without when."""

    def __init__(self) -> None:
        self.lines = list[str]()
        self._one_more = threading.Semaphore(0)

    def echo(self, line: str, *, err: bool) -> None:
        assert err
        self.lines.append(line.partition(": ")[2])
        self._one_more.release()

    def wait_for(self, count: int) -> list[str]:
        for _ in range(count):
            assert self._one_more.acquire(timeout=30)
        return self.lines[:count]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    said = Said()
    monkeypatch.setattr(waiting, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "http_of", lambda service: service)
    monkeypatch.setattr(click, "echo", said.echo)
    return said


def test_it_is_what_the_processes_are_busy_with(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"processes": [{"work": ["looking: 3 of 9 rows"]}, {"work": ["snapshot: 1 of 2 bytes"]}]}
    monkeypatch.setattr(Route, "get_json", lambda _route, _path: status)
    with waiting.waiting_for(SERVICE):
        assert said.wait_for(2) == ["looking: 3 of 9 rows", "snapshot: 1 of 2 bytes"]


def test_who_may_not_see_it_is_told_that_it_goes_on(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_route: Any, _path: str) -> Any:
        raise ServiceUnavailable("no")

    monkeypatch.setattr(Route, "get_json", refuse)
    with waiting.waiting_for(SERVICE):
        assert said.wait_for(2) == ["waiting", "waiting"]


def test_what_goes_wrong_is_told_as_without_it() -> None:
    with pytest.raises(KeyError), waiting.waiting_for(SERVICE):
        raise KeyError
