"""Throughput from publish to applied, and CPU time of the service, against the bare path of the same rows.

The bare path (`bare_path.py`) has the same three processes and stages: a row crosses two streams, is checked,
written to disk, applied and proven. It has no logic. A bare stream carries the same rows once from one process to
another, which throws them away.

All of them take turns. Each ratio is the median of those of the rounds.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.bare_path import BareSource
from tests.bench.children import Children, publisher
from tests.bench.process import cpu_seconds
from tests.bench.timing import spread_of

from deltasync.base.process import keep_freed_memory
from deltasync.client import Part, Position, Publisher, RowBatch, TableSpec

ROWS, DIM, CUTS = 1_000_000, 64, 20
# The log file grows for a dozen rounds, until it has room for the rows of three checkpoints.
WARM_UP, ROUNDS = 12, 9
OPTIONS = (
    click.option("--rows", type=click.IntRange(CUTS), default=ROWS, help="Rows of the table, all published."),
    click.option("--rounds", type=click.IntRange(1), default=ROUNDS, help="Rounds, in which each has a turn."),
)


class Turn(NamedTuple):
    """What it took to carry all rows once: seconds, and CPU seconds of some processes."""

    seconds: float
    cpu_seconds: float


class Round(NamedTuple):
    """A turn of each."""

    path: Turn
    bare_path: Turn
    stream: Turn


def run(console: Console, rows: int, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    values = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    with Children() as children:
        service = children.service("--consumer", "bench=bench")
        replica = children.peer("replica", service.grpc)
        replica.read()
        stream = _stream(children, rows)
        sizes = str(rows), str(DIM)
        bare_service = children.peer("service", str(children.processes.folder), *sizes, module=_BARE)
        address = bare_service.read()
        bare_replica = children.peer("replica", address, *sizes, module=_BARE)
        bare_replica.read()
        with publisher(service.grpc, [table_of(values)]) as source, BareSource(address) as bare_source:

            def bare(_: int) -> float:
                started = time.perf_counter()
                bare_replica.begin(str(CUTS))
                bare_source.publish(values, CUTS)
                bare_replica.read()
                return time.perf_counter() - started

            publish_rows(source, values, step=1, cuts=1)
            path = timed([service.pid], lambda n: publish_to_applied(source, replica.ask, values, n))
            bare_path = timed([bare_service.process.pid], bare)
            turns = [Round(path(number), bare_path(number), stream(number)) for number in range(WARM_UP + rounds)]
    return _report(console, rows, turns[WARM_UP:])


_BARE = "tests.bench.bare_path"


def _stream(children: Children, rows: int) -> Callable[[int], Turn]:
    """A bare stream between two processes: sends all rows when called."""
    sink = children.peer("sink")
    source = children.peer("source", sink.read(), str(rows), str(DIM))
    return timed([sink.process.pid, source.process.pid], lambda _: float(source.ask("go")))


def timed(pids: list[int], seconds_of: Callable[[int], float]) -> Callable[[int], Turn]:
    """A function that does a turn, and takes the CPU time of some processes with it."""

    def turn(number: int) -> Turn:
        before = sum(map(cpu_seconds, pids))
        seconds = seconds_of(number)
        return Turn(seconds, sum(map(cpu_seconds, pids)) - before)

    return turn


def table_of(values: NDArray[Any]) -> TableSpec:
    """The table that holds these rows [rows, DIM]."""
    return TableSpec("bench", *values.shape)


def publish_to_applied(source: Publisher, ask: Callable[[str], str], values: NDArray[Any], number: int) -> float:
    """Seconds from the first publish to all rows applied in the replica that `ask` asks, in a numbered round."""
    started = time.perf_counter()
    position = publish_rows(source, values, step=2 + number * CUTS, cuts=CUTS)
    ask(str(position.number))
    return time.perf_counter() - started


def publish_rows(source: Publisher, values: NDArray[Any], *, step: int, cuts: int) -> Position:
    """Publish all rows ([rows, DIM] float32) in some cuts, from a step on; the position of the last."""
    sealed: Future[Position] | None = None
    for number in range(cuts):
        ids = np.arange(number, len(values), cuts)
        rows = [RowBatch.of_table(table_of(values), ids, np.take(values, ids, axis=0, mode="clip"))]
        if sealed:
            sealed.result()
        part = Part(step=step + number, step_end_unix_ns=time.time_ns(), rows=rows, full=cuts == 1)
        sealed = source.publish(part)
    if sealed is None:
        raise ValueError(f"cuts: {cuts}, expected at least 1")
    return sealed.result()


def _report(console: Console, rows: int, rounds: list[Round]) -> dict[str, Any]:
    size = rows * TableSpec("bench", rows, DIM).row_bytes / 1e9
    speed = {
        name: size / statistics.median(getattr(each, name).seconds for each in rounds) for name in Round._fields
    }
    cpu = statistics.median(each.path.cpu_seconds for each in rounds) / size
    bare_cpu = statistics.median(each.bare_path.cpu_seconds for each in rounds) / size
    figures = {
        **spread_of("path_ratio", [each.bare_path.seconds / each.path.seconds for each in rounds]),
        **spread_of("throughput_ratio", [each.stream.seconds / each.path.seconds for each in rounds]),
        "service_cpu_ratio": cpu / bare_cpu if bare_cpu else 0.0,
        "service_cpu_seconds_per_gb": cpu,
        "bare_path_cpu_seconds_per_gb": bare_cpu,
        "publish_to_applied_gb_per_second": speed["path"],
        "bare_path_gb_per_second": speed["bare_path"],
        "bare_stream_gb_per_second": speed["stream"],
        "rows": rows,
        "rounds": len(rounds),
    }
    console.print(f"publish: {rows:,} rows x {DIM} fp32 in {CUTS} cuts, median of {len(rounds)} rounds")
    for name, says, ratio in (
        ("path", "publish to applied", ""),
        ("bare_path", "bare path", f"ratio {figures['path_ratio']:.2f}  (aim 1.1)"),
        ("stream", "bare gRPC stream", f"ratio {figures['throughput_ratio']:.2f}  (aim 0.4)"),
    ):
        console.print(f"  {says:<25}  {speed[name]:.2f} GB/s   {ratio}")
    console.print(
        f"  CPU of the service         {cpu:.2f} s/GB   of the bare path's {bare_cpu:.2f} s/GB   "
        f"ratio {figures['service_cpu_ratio']:.2f}  (aim 1.2)"
    )
    return figures
