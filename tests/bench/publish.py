"""Throughput from publish to applied, against one bare gRPC stream of the same bytes.

A row crosses two streams on its way, is written to disk, and is scattered and gathered in between. The bare
stream carries the same messages once from one process to another, which throws them away: as generated code
and gRPC's defaults do it, and once more with the allocator tuned as our own processes have it.

CPU time is that of the service's process, beside that of both processes of the bare stream.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.children import Children, publisher
from tests.bench.process import cpu_seconds

from deltasync.base.process import keep_freed_memory
from deltasync.client import Part, Position, Publisher, RowBatch, TableSpec

ROWS, DIM, CUTS = 1_000_000, 64, 20
# The first rounds touch every page of tables and log for the first time.
WARM_UP, ROUNDS = 3, 9
TABLE = TableSpec("bench", ROWS, DIM)


class Turn(NamedTuple):
    """What it took to carry all rows once: seconds, and CPU seconds of some processes."""

    seconds: float
    cpu_seconds: float


def run(console: Console) -> dict[str, Any]:
    keep_freed_memory()
    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    with Children() as children:
        service = children.service("--consumer", "bench=bench")
        bare, tuned = _stream(children, ""), _stream(children, "tuned-")
        replica = children.peer("replica", service.grpc)
        replica.read()
        with publisher(service.grpc, [TABLE]) as source:
            publish_rows(source, values, step=1, cuts=1)
            path = timed([service.pid], lambda n: publish_to_applied(source, replica.ask, values, n))
            rounds = [(path(number), bare(number), tuned(number)) for number in range(WARM_UP + ROUNDS)]
    return _report(console, rounds[WARM_UP:])


def _stream(children: Children, kind: str) -> Callable[[int], Turn]:
    """A bare stream between two processes: sends all rows when called."""
    sink = children.peer(f"{kind}sink")
    source = children.peer(f"{kind}source", sink.read(), str(ROWS), str(DIM))
    return timed([sink.process.pid, source.process.pid], lambda _: float(source.ask("go")))


def timed(pids: list[int], seconds_of: Callable[[int], float]) -> Callable[[int], Turn]:
    """A function that does a turn, and takes the CPU time of some processes with it."""

    def turn(number: int) -> Turn:
        before = sum(map(cpu_seconds, pids))
        seconds = seconds_of(number)
        return Turn(seconds, sum(map(cpu_seconds, pids)) - before)

    return turn


def publish_to_applied(source: Publisher, ask: Callable[[str], str], values: NDArray[Any], number: int) -> float:
    """Seconds from the first publish to all rows applied in the replica that `ask` asks, in a numbered round."""
    started = time.perf_counter()
    position = publish_rows(source, values, step=2 + number * CUTS, cuts=CUTS)
    ask(str(position.number))
    return time.perf_counter() - started


def publish_rows(source: Publisher, values: NDArray[Any], *, step: int, cuts: int) -> Position:
    """Publish all rows ([ROWS, DIM] float32) in so many cuts, from a step on; the position of the last."""
    sealed: Future[Position] | None = None
    for number in range(cuts):
        ids = np.arange(number, ROWS, cuts)
        rows = [RowBatch.of_table(TABLE, ids, np.take(values, ids, axis=0, mode="clip"))]
        if sealed:
            sealed.result()
        part = Part(step=step + number, step_end_unix_ns=time.time_ns(), rows=rows, full=cuts == 1)
        sealed = source.publish(part)
    if sealed is None:
        raise ValueError(f"cuts: {cuts}, expected at least 1")
    return sealed.result()


def _report(console: Console, rounds: list[tuple[Turn, Turn, Turn]]) -> dict[str, Any]:
    size = ROWS * TABLE.row_bytes / 1e9
    path, bare, tuned = (
        size / statistics.median(turn.seconds for turn in column) for column in zip(*rounds, strict=True)
    )
    service_cpu, bare_cpu = (statistics.median(r[kind].cpu_seconds for r in rounds) / size for kind in (0, 1))
    figures = {
        "throughput_ratio": statistics.median(bare.seconds / path.seconds for path, bare, _ in rounds),
        "throughput_ratio_tuned": statistics.median(tuned.seconds / path.seconds for path, _, tuned in rounds),
        "service_cpu_ratio": service_cpu / bare_cpu,
        "service_cpu_seconds_per_gb": service_cpu,
        "bare_stream_cpu_seconds_per_gb": bare_cpu,
        "publish_to_applied_gb_per_second": path,
        "bare_stream_gb_per_second": bare,
        "tuned_stream_gb_per_second": tuned,
        "rounds": len(rounds),
    }
    console.print(f"publish: {ROWS:,} rows x {DIM} fp32 in {CUTS} cuts, median of {len(rounds)} rounds")
    console.print(f"  publish to applied         {path:.2f} GB/s")
    console.print(
        f"  bare gRPC stream           {bare:.2f} GB/s   ratio {figures['throughput_ratio']:.2f}  (aim 0.5)"
    )
    console.print(f"  the same, allocator tuned  {tuned:.2f} GB/s   ratio {figures['throughput_ratio_tuned']:.2f}")
    console.print(
        f"  CPU of the service         {service_cpu:.2f} s/GB   of the bare stream's ends {bare_cpu:.2f} s/GB   "
        f"ratio {figures['service_cpu_ratio']:.2f}  (aim 1.5)"
    )
    return figures
