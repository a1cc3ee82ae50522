"""What people read on a terminal: lines, tables, numbers, and what the processes of a service answer."""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

import click

from deltasync.base.errors import DeltasyncError, ServiceUnavailable
from deltasync.base.words import duration, printable
from deltasync.client.admin import EachProcess, joined, owners_lines
from deltasync.client.endpoint import Endpoint

_STATES = (
    *("failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current"),
    "in sync",
)


def say(*lines: str, err: bool = False) -> None:
    """Print lines. All text of a command goes out here.

    Characters that do not print are escaped. Names come from others: one with a line break or a control sequence
    would otherwise forge a line, or command the terminal.
    """
    click.echo("\n".join(map(one_line, lines)), err=err)


def one_line(text: object) -> str:
    """A text of any length with the characters escaped that do not print."""
    return printable(str(text), sys.maxsize)


def paragraphs(parts: Iterable[Sequence[str]]) -> list[str]:
    """The lines of all parts, with an empty line between two of them."""
    return [line for part in parts if part for line in ("", *part)][1:]


def text_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Format rows under their titles, a line each.

    Columns of numbers are aligned to the right. None is an empty cell.
    """
    lines = [["" if cell is None else one_line(cell) for cell in row] for row in rows]
    everything = [list(titles), *lines]
    widths = [max(len(line[at]) for line in everything) for at in range(len(titles))]
    right = [bool(lines) and all(_is_number(line[at]) for line in lines) for at in range(len(titles))]
    return [_line(line, widths, right) for line in everything]


def seconds(number: float | None) -> str:
    """A duration; empty where it is not known."""
    return "" if number is None else duration(number)


def size(number: float | None) -> str:
    """Bytes: `512 B`, `4.0 kB`, `1.2 GB`; empty where that is not known."""
    if number is None:
        return ""
    if number < 1000:
        return f"{number:.0f} B"
    units = ("kB", "MB", "GB", "TB")
    at = min(len(units), int(math.log10(number) / 3))
    return f"{number / 1000**at:.1f} {units[at - 1]}"


def share(number: float | None) -> str:
    """A share of one as percents; empty where it is not known."""
    return "" if number is None else f"{100 * number:.3g} %"


def urgency(state: str) -> int:
    """The place of a state among all, those that need somebody first."""
    return _STATES.index(state) if state in _STATES else -1


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    shown = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(shown).rstrip()


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit()


SERVICE = ("fastapi", "grpc_health", "grpc_reflection", "lmdb", "prometheus_client", "uvicorn", "xxhash")
TRAINER = ("rich", "tensordict", "torch", "torchrec")


def check_needs(*modules: str) -> None:
    """Find modules without importing them: that would take seconds, and help needs none of them.

    Raises:
        ModuleNotFoundError: the first that is not there.
    """
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


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
        "models": owners_lines((each["models"] for each in answers), "model"),
        "trainers": _of(answers, "trainers", "model", "rank"),
        "consumers": owners_lines((each["consumers"] for each in answers), "consumer"),
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
