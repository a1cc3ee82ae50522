"""Terminal output: lines, tables, numbers, and the answers of a service's processes."""

import contextlib
import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import click

from deltasync.base.errors import DeltasyncError, ServiceUnavailable
from deltasync.base.words import duration, printable
from deltasync.client.admin import EachProcess, joined, owners_lines
from deltasync.client.endpoint import Endpoint
from deltasync.status.records import URGENCY, Unit, columns

F = TypeVar("F", bound=Callable[..., Any])


def say(*lines: str, err: bool = False) -> None:
    """Print lines, with unprintable characters escaped. Commands print all text through this function.

    Names come from other people. One with a line break or a control sequence could forge a line or control the
    terminal.
    """
    click.echo("\n".join(map(one_line, lines)), err=err)


def one_line(text: object) -> str:
    """Escape the unprintable characters of a text of any length."""
    return printable(str(text), sys.maxsize)


def paragraphs(parts: Iterable[Sequence[str]]) -> list[str]:
    """Join parts with an empty line between them; skip empty parts."""
    return [line for part in parts if part for line in ("", *part)][1:]


def text_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Format rows under their titles, one per line, numbers on the right. None is an empty cell."""
    lines = [["" if cell is None else one_line(cell) for cell in row] for row in rows]
    everything = [list(titles), *lines]
    columns = [
        (str.rjust if lines and all(not line[at] or line[at][0].isdigit() for line in lines) else str.ljust, width)
        for at, width in enumerate(max(map(len, column)) for column in zip(*everything, strict=True))
    ]
    return [
        "  ".join(align(cell, width) for cell, (align, width) in zip(line, columns, strict=True)).rstrip()
        for line in everything
    ]


def record_table(record: type, lines: Iterable[Mapping[str, Any]], by: str = "") -> list[str]:
    """Format records, one per line; `by` is a key that the lines have besides, for the first column."""
    shown = columns(record)
    first = [by] if by else []
    rows = (
        [*(line[key] for key in first), *(_cell(each.value(line), each.shown.unit) for each in shown)]
        for line in lines
    )
    return text_table([*first, *(each.shown.title for each in shown)], rows)


def with_columns(*records: type) -> Callable[[F], F]:
    """Describe the columns of records in the help of a command."""
    shown = [each.shown for record in records for each in columns(record)]
    width = max(len(each.title) for each in shown) + 2
    wrap = partial(textwrap.fill, width=108, subsequent_indent=" " * width)
    lines = [wrap(f"{each.title:<{width}}{each.description}") for each in shown]

    def described(command: F) -> F:
        indented = textwrap.indent("\n".join(lines), "    ")
        command.__doc__ = f"{(command.__doc__ or '').rstrip()}\n\n    \b\n{indented}\n    "
        return command

    return described


def _cell(value: Any, unit: Unit) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    match unit:
        case "bytes":
            return size(value)
        case "seconds":
            return duration(value)
        case "age of ns":
            return duration(max(0.0, (time.time_ns() - value) / 1e9))
        case "share":
            return share(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(number: float | None) -> str:
    """Format a duration; empty if None."""
    return "" if number is None else duration(number)


def size(number: float | None) -> str:
    """Format bytes: `512 B`, `4.0 kB`, `1.2 GB`; empty if None."""
    if number is None:
        return ""
    if number < 1000:
        return f"{number:.0f} B"
    units = ("kB", "MB", "GB", "TB")
    at = min(len(units), int(math.log10(number) / 3))
    return f"{number / 1000**at:.1f} {units[at - 1]}"


def share(number: float | None) -> str:
    """Format a fraction as a percentage; empty if None."""
    return "" if number is None else f"{100 * number:.3g} %"


def urgency(state: str) -> int:
    """The sort key of a state; the most urgent comes first."""
    return URGENCY.index(state) if state in URGENCY else -1


SERVICE = ("fastapi", "grpc_health", "grpc_reflection", "lmdb", "prometheus_client", "uvicorn", "xxhash")
TRAINER = ("rich", "tensordict", "torch", "torchrec")


def check_needs(*modules: str) -> None:
    """Check that modules are installed, without importing them, which would slow down `--help` by seconds."""
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


Show = Callable[[EachProcess], list[str]]

_SECONDS, _WAITING_SECONDS = 1.0, 5.0
# Maximum number of cuts and events in an overview of all processes.
_CUTS, _EVENTS = 20, 30


def json_option(command: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")(command)


def watch_option(command: F) -> F:
    """`--watch`."""
    return click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")(command)


def json_lines(answer: Any) -> list[str]:
    """Format an answer as lines of ASCII JSON; paths become strings."""
    return json.dumps(answer, indent=2, default=str).splitlines()


def show(
    what: Show, http: Endpoint, *, watch: bool = False, pause: Callable[[float], None] = time.sleep
) -> EachProcess:
    """Print the lines that `what` returns and the processes that did not answer; return the processes asked last.

    With `watch`, repeat this after a pause until Ctrl-C, even while the service does not answer.
    """
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            processes = EachProcess(http)
            try:
                lines = what(processes)
            except ServiceUnavailable as error:
                if not watch:
                    raise
                lines = [f"The service does not answer: {error}"]
            if watch:
                click.clear()
            say(*lines)
            print_missing(processes)
            if not watch:
                break
            pause(_SECONDS)
    return processes


def print_missing(processes: EachProcess) -> None:
    """Print to standard error the processes that did not answer and the models without an owner."""
    for name, why in processes.missing.items():
        say(f"process {name} did not answer, so its part is missing: {why}", err=True)
    for model in processes.unowned:
        say(f"model {model} is missing: no running process owns it", err=True)


def overview(processes: EachProcess) -> dict[str, Any]:
    """The answers of all processes to `GET /status`, combined."""
    answers = processes.answers("/status")

    def of(name: str, *by: str) -> list[dict[str, Any]]:
        return joined((each[name] for each in answers), *by)

    return {
        **answers[0],
        "processes": of("processes", "process"),
        "models": owners_lines((each["models"] for each in answers), "model"),
        "trainers": of("trainers", "model", "rank"),
        "consumers": owners_lines((each["consumers"] for each in answers), "consumer"),
        "cuts": of("cuts", "seconds_ago")[:_CUTS],
        "events": of("events", "unix_ns")[-_EVENTS:],
        "missing": sorted(processes.missing),
    }


@contextlib.contextmanager
def waiting_for(http: Endpoint) -> Iterator[None]:
    """Print the service's current work to standard error every few seconds while the block runs."""
    ended, begun = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(_WAITING_SECONDS):
            for line in _work(http) or ["waiting"]:
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
    except DeltasyncError:  # The caller may lack role read.
        return []
    return [line for process in status["processes"] for line in process["work"]]
