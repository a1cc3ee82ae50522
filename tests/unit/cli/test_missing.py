"""Lists of a service some of whose processes do not answer: commands say so, and scripts are told."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.support.command import deltasync

from deltasync.cli.output import show
from deltasync.cli.status import BEHIND
from deltasync.client import Admin, Endpoint, ServiceUnavailable
from deltasync.client.admin import EachProcess
from deltasync.status.records import ConsumerStatus, Freshness, Lag

LINE = asdict(
    ConsumerStatus(
        consumer="predictors",
        model="clicks",
        state="in sync",
        reason="all hold it",
        lag=Lag(0, 0, 0, 0.0),
        connected=1,
        fleet=1,
        freshness=Freshness([], 0),
    )
)


class Processes:
    """Three processes of a service: each answers a route with what it is told to.

    One that is gone answers 503. One that has ended is known to have. One that is cut off hears of no others.
    """

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = [{}, {}, {}]
        self.gone, self.ended, self.cut_off = set[int](), set[int](), set[int]()
        self.unowned = list[str]()
        self._servers = [HTTPServer(("127.0.0.1", 0), self._handler(number)) for number in range(3)]
        self.addresses = [f"http://127.0.0.1:{each.server_port}" for each in self._servers]
        self._threads = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in self._servers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return deltasync(*arguments, "--service", ",".join(self.addresses))

    def _answer(self, number: int, path: str) -> Any:
        if path == "/processes":
            return [
                {
                    "process": f"sync-{other}",
                    "http": address,
                    "here": other == number,
                    "alive": other not in self.ended,
                    "confirmed": number not in self.cut_off,
                    "unowned": self.unowned if other == number else [],
                }
                for other, address in enumerate(self.addresses)
            ]
        return self.answers[number].get(path, [])

    def _handler(self, number: int) -> type[BaseHTTPRequestHandler]:
        processes = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(processes._answer(number, self.path.partition("?")[0])).encode()
                self.send_response(503 if number in processes.gone else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        return Handler


@pytest.fixture
def service() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


LISTS = [
    ("lag",), ("consumers", "list"), ("tables", "list"), ("cuts",), ("events",), ("replicas", "list"),
    ("checkpoints",),
]  # fmt: skip


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_process_that_has_not_answered_is_named(
    service: Processes, command: tuple[str, ...], form: tuple[str, ...]
) -> None:
    code, before, err = service.run(*command, *form)
    assert (code, err) == (0, "")
    service.gone = {1, 2}
    code, out, err = service.run(*command, *form)
    assert (code, out) == (0, before)
    assert [line.partition(",")[0] for line in err.splitlines()] == [
        "process sync-1 did not answer",
        "process sync-2 did not answer",
    ]
    service.gone = {0, 1, 2}
    assert service.run(*command, *form)[0] == 1


def test_lists_of_all_processes_are_one_list(service: Processes) -> None:
    for number, model in enumerate(("c", "a", "b")):
        service.answers[number]["/models"] = [{"model": model, "head": 1, "checkpoint": {"version": 1}}]
    found = json.loads(service.run("checkpoints", "--json")[1])
    assert [each["model"] for each in found] == ["a", "b", "c"]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_the_owner_of_a_consumer_is_shown_not_other_processes(service: Processes, owner: int) -> None:
    for number in range(3):
        known = {**LINE, "head": 7} if number == owner else {**LINE, "head": None, "state": "waiting"}
        service.answers[number]["/consumers"] = [known, {**LINE, "consumer": f"of-{number}", "head": 1}]
    found = json.loads(service.run("lag", "--json")[1])
    assert [(each["consumer"], each["head"]) for each in found] == [
        *((f"of-{number}", 1) for number in range(3)),
        ("predictors", 7),
    ]


def test_the_overview_is_that_of_all_processes(service: Processes) -> None:
    for number in range(3):
        model = {"model": "m", "head": 5 if number == 1 else None}
        service.answers[number]["/status"] = {
            "unix_ms": number,
            "processes": [{"process": f"sync-{number}", "work": [f"work of {number}"]}],
            "models": [model],
            "consumers": [],
            "trainers": [{"model": "m", "rank": 2 - number}],
            "cuts": [{"seconds_ago": 30 - each} for each in range(number, number + 20)],
            "events": [{"unix_ns": 100 * each + number} for each in range(20)],
        }
    service.gone = {2}
    code, out, err = service.run("status", "--json")
    found = json.loads(out)
    assert (code, "sync-2" in err, found["missing"]) == (0, True, ["sync-2"])
    assert [each["process"] for each in found["processes"]] == ["sync-0", "sync-1"]
    assert found["models"] == [{"model": "m", "head": 5}]
    assert [each["rank"] for each in found["trainers"]] == [1, 2]
    assert [each["seconds_ago"] for each in found["cuts"]][:3] == [10, 11, 11]
    assert (len(found["cuts"]), len(found["events"])) == (20, 30)
    assert found["events"][-1] == {"unix_ns": 1901}


def test_a_program_is_not_given_a_part_for_everything(service: Processes) -> None:
    service.answers[1]["/consumers"] = [{"consumer": "predictors"}]
    admin = Admin(service.addresses[0])
    assert admin.consumers() == [{"consumer": "predictors"}]
    service.gone = {1}
    with pytest.raises(ServiceUnavailable, match="process sync-1 has not answered"):
        admin.consumers()


def test_a_script_is_told_that_lag_is_not_known_of_all(service: Processes) -> None:
    script = ("lag", "--max-seconds", "5")
    code, _, err = service.run(*script)
    assert (code, "there are no consumers" in err) == (BEHIND, True)
    assert service.run("lag")[0] == 0
    service.answers[0]["/consumers"] = [LINE]
    assert service.run(*script)[0] == 0
    service.unowned = ["clicks"]
    code, _, err = service.run(*script)
    assert (code, err) == (BEHIND, "model clicks is missing: no running process owns it\n")
    service.unowned, service.gone = [], {1}
    code, out, err = service.run(*script)
    assert (code, "predictors" in out, "sync-1" in err) == (BEHIND, True, True)


def test_a_process_that_has_ended_is_not_asked(service: Processes) -> None:
    service.answers = [{"/consumers": [{**LINE, "consumer": str(number)}]} for number in range(3)]
    service.ended = {1}
    code, out, err = service.run("lag", "--json", "--max-seconds", "5")
    assert (code, [each["consumer"] for each in json.loads(out)], err) == (0, ["0", "2"], "")


def test_a_process_that_hears_of_no_others_is_not_the_one_to_list_them(service: Processes) -> None:
    service.answers = [{"/models": [{"model": str(number)}]} for number in range(3)]
    service.cut_off = {0}
    answers = EachProcess(Endpoint.of_http(",".join(service.addresses))).answers("/models")
    assert answers == [[{"model": "0"}], [{"model": "1"}], [{"model": "2"}]]
    service.cut_off = {0, 1, 2}
    assert len(EachProcess(Endpoint.of_http(service.addresses[0])).answers("/models")) == 3


def test_what_is_watched_says_it_too(service: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter([{1}, set[int](), None])

    def pause(_: float) -> None:
        gone = next(turns)
        if gone is None:
            raise KeyboardInterrupt
        service.gone = gone

    here = Endpoint.of_http(",".join(service.addresses))
    show(lambda processes: list(map(str, processes.answers("/consumers"))), here, watch=True, pause=pause)
    assert capsys.readouterr().err.count("process sync-1 did not answer") == 1
