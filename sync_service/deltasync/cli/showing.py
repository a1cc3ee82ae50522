"""Showing what the processes of a service answer: once or again and again, and while one of them works."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from deltasync.cli.text_table import say
from deltasync.client.each_process import EachProcess, joined, known
from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import DeltasyncError, ServiceUnavailable

F = TypeVar("F", bound=Callable[..., Any])
Show = Callable[[EachProcess], list[str]]

_SECONDS, _WAITING_SECONDS = 1.0, 5.0
# What an overview shows of all processes at most.
_CUTS, _EVENTS = 20, 30


def json_option(command: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")(command)


def watch_option(command: F) -> F:
    """`--watch`."""
    return click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")(command)


def json_lines(answer: Any) -> list[str]:
    """An answer as it came, for programs: the lines of its JSON, in ASCII; paths as text."""
    return json.dumps(answer, indent=2, default=str).splitlines()


def show(what: Show, http: Endpoint, *, watch: bool = False) -> EachProcess:
    """Print the lines that `what` returns, and name the processes that did not answer: once, or until Ctrl-C.

    With `watch`, a service that does not answer is asked again.

    Returns:
        The processes that were asked last.
    """
    processes = EachProcess(http)
    if not watch:
        _print(what(processes), processes)
        return processes
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            processes = EachProcess(http)
            lines = _tried(what, processes)
            click.clear()
            _print(lines, processes)
            time.sleep(_SECONDS)
    return processes


def print_missing(processes: EachProcess) -> None:
    """Print which processes have not answered, and which models none of them has, to standard error."""
    for name, why in processes.missing.items():
        say(f"process {name} has not answered, and its part is missing: {why}", err=True)
    for model in processes.unowned:
        say(f"model {model} is missing: no process that is alive has it", err=True)


def overview(processes: EachProcess) -> dict[str, Any]:
    """What `GET /status` answers, of all processes."""
    answers = processes.answers("/status")
    cuts, events = _of(answers, "cuts", "seconds_ago"), _of(answers, "events", "unix_ns")
    return {
        **answers[0],
        "processes": _of(answers, "processes", "process"),
        "models": known((each["models"] for each in answers), "model"),
        "trainers": _of(answers, "trainers", "model", "rank"),
        "consumers": known((each["consumers"] for each in answers), "consumer"),
        "cuts": cuts[:_CUTS],
        "events": events[-_EVENTS:],
        "missing": sorted(processes.missing),
    }


def _of(answers: list[Any], name: str, *by: str) -> list[dict[str, Any]]:
    return joined((each[name] for each in answers), *by)


@contextlib.contextmanager
def waiting_for(http: Endpoint | None) -> Iterator[None]:
    """While the block runs, print every few seconds to standard error what the service is busy with.

    Args:
        http: where it answers; None = it cannot be asked.
    """
    ended, begun = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(_WAITING_SECONDS):
            for line in (_work(http) if http else []) or ["waiting"]:
                if not ended.is_set():
                    say(f"{time.monotonic() - begun:.0f} s: {line}", err=True)

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _work(http: Endpoint) -> list[str]:
    try:
        status = overview(EachProcess(http))
    except DeltasyncError:  # A caller that may ask for the work need not be allowed to see it.
        return []
    return [line for process in status["processes"] for line in process["work"]]


def _print(lines: list[str], processes: EachProcess) -> None:
    say(*lines)
    print_missing(processes)


def _tried(what: Show, processes: EachProcess) -> list[str]:
    try:
        return what(processes)
    except ServiceUnavailable as error:
        return [f"The service does not answer: {error}"]
