"""Lists of a service some of whose processes do not answer: commands say so, and scripts are told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.support.command import deltasync

from deltasync.cli.lag import BEHIND

LINE = {
    "consumer": "predictors", "model": "clicks", "state": "in sync", "reason": "all hold it", "versions": 0,
    "rows": 0, "bytes": 0, "seconds": 0.0, "unsent_share": None, "connected": 1, "replicas": 1,
    "freshness": {"p50": None, "p99": None}, "wrong": [],
}  # fmt: skip


class Service:
    """Answers each route with what it is told to, and names processes that have not answered."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.missing = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.answers.get(self.path.partition("?")[0], [])).encode()
                self.send_response(200)
                if outer.missing:
                    self.send_header("deltasync-missing", outer.missing)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return deltasync(*arguments, "--service", self.address)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


LISTS = [
    ("lag",), ("consumers", "list"), ("tables", "list"), ("versions",), ("events",), ("replicas", "list"),
    ("snapshots",),
]  # fmt: skip


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_who_has_not_answered_is_named(service: Service, command: tuple[str, ...], form: tuple[str, ...]) -> None:
    code, before, err = service.run(*command, *form)
    assert (code, err) == (0, "")
    service.missing = "sync-1, sync-2"
    code, out, err = service.run(*command, *form)
    assert (code, out) == (0, before)
    assert err.count("\n") == 1
    assert "sync-1, sync-2" in err
    assert "deltasync processes" in err


def test_a_script_is_told_that_lag_is_not_known_of_all(service: Service) -> None:
    service.answers["/lag"] = [LINE]
    assert service.run("lag", "--max-seconds", "5")[0] == 0
    service.missing = "sync-1"
    code, out, err = service.run("lag", "--max-seconds", "5")
    assert (code, "predictors" in out, "sync-1" in err) == (BEHIND, True, True)


def test_a_script_is_told_that_there_are_no_consumers(service: Service) -> None:
    code, _, err = service.run("lag", "--max-seconds", "5")
    assert (code, "there are no consumers" in err) == (BEHIND, True)
    assert service.run("lag")[0] == 0


def test_what_is_watched_says_it_too(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(["sync-1", "", None])

    def sleep(_: float) -> None:
        missing = next(turns)
        if missing is None:
            raise KeyboardInterrupt
        service.missing = missing

    monkeypatch.setattr("deltasync.cli.watching.time.sleep", sleep)
    code, _, err = service.run("lag", "--watch")
    assert (code, err.count("sync-1")) == (0, 1)
