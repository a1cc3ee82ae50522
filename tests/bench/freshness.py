"""How soon rows are in a replica: from publish to applied, against two bare gRPC hops and one write to the disk.

A cut of 2,000 rows x 16 crosses two streams, and is on disk in between. The bare path is a stream that carries
messages of the same bytes from one process to another and back, which does nothing with them, and a file to whose
end they are written, with one `fdatasync`. Both take turns, one cut at a time, with pauses as of training steps.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from tests.bench.children import Children, Peer, publisher
from tests.bench.peers import Echo
from tests.bench.timing import spread_of

from deltasync.base.process import keep_freed_memory
from deltasync.client import Part, Publisher, RowBatch, TableSpec
from deltasync.wire.row_messages import part_chunk

ROWS, DIM, CUT_ROWS = 100_000, 16, 2_000
# The first turns touch pages of tables and log for the first time, and find streams that are still slow.
WARM_UP, TURNS = 50, 400
PAUSE_SECONDS = 0.01
_TABLE = TableSpec("bench", ROWS, DIM)


def run(console: Console) -> dict[str, Any]:
    keep_freed_memory()
    with Children() as children, _synced_file() as write, Echo(children.peer("echo").read()) as echo:
        service = children.service("--consumer", "bench=bench")
        replica = children.peer("clock", service.grpc)
        replica.read()
        with publisher(service.grpc, [_TABLE]) as source:
            path = _Path(source, replica)
            path.publish(np.arange(ROWS))
            turns = [_turn(path, echo, write) for _ in range(WARM_UP + TURNS)]
    return _report(console, turns[WARM_UP:])


class _Path:
    """From a publisher through a service to a replica."""

    def __init__(self, publisher: Publisher, replica: Peer) -> None:
        self._publisher = publisher
        self._replica = replica
        self._random = np.random.default_rng(0)
        self._step = 0

    def batch(self) -> RowBatch:
        ids = np.sort(self._random.choice(ROWS, CUT_ROWS, replace=False))
        return RowBatch.of_table(_TABLE, ids, self._values(CUT_ROWS))

    def publish(self, ids: Any) -> None:
        """Publish a full cut, and wait until the replica has it."""
        self.seconds(RowBatch.of_table(_TABLE, ids, self._values(len(ids))), full=True)

    def seconds(self, rows: RowBatch, *, full: bool = False) -> float:
        """Seconds from the call of `publish` until the replica's target holds the rows."""
        self._step += 1
        started = time.monotonic_ns()
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=[rows], full=full)
        sealed = self._publisher.publish(part)
        applied = int(self._replica.ask(str(sealed.result().number)))
        return (applied - started) / 1e9

    def _values(self, rows: int) -> Any:
        return self._random.normal(size=(rows, DIM)).astype(np.float32)


def _turn(path: _Path, echo: Echo, write: Callable[[bytes], None]) -> tuple[float, float, float]:
    """Seconds of the path, of two bare hops, and of a write."""
    time.sleep(PAUSE_SECONDS)
    rows = path.batch()
    seconds, message = path.seconds(rows), part_chunk(1, 0, rows)
    return seconds, _seconds(echo.there_and_back, message), _seconds(write, message)


def _seconds(function: Callable[[bytes], None], message: bytes) -> float:
    started = time.perf_counter()
    function(message)
    return time.perf_counter() - started


@contextmanager
def _synced_file() -> Iterator[Callable[[bytes], None]]:
    """Appends what it is called with to a file, and waits until it is on disk."""
    with tempfile.TemporaryFile() as file:

        def write(data: bytes) -> None:
            os.write(file.fileno(), data)
            os.fdatasync(file.fileno())

        yield write


def _report(console: Console, turns: list[tuple[float, float, float]]) -> dict[str, Any]:
    path, hops, write = ([1e3 * each for each in column] for column in zip(*turns, strict=True))
    bare = statistics.median(hops) + statistics.median(write)
    figures = {
        "freshness_ratio": statistics.median(path) / bare,
        **spread_of("publish_to_applied_ms", path),
        "publish_to_applied_ms_p99": statistics.quantiles(path, n=100)[-1],
        **spread_of("two_hops_ms", hops),
        **spread_of("write_ms", write),
        "turns": len(turns),
    }
    console.print(f"freshness: cuts of {CUT_ROWS:,} rows x {DIM} fp32, one at a time, {len(turns)} of them")
    console.print(
        f"  publish to applied              p50 {figures['publish_to_applied_ms']:6.2f} ms   "
        f"p99 {figures['publish_to_applied_ms_p99']:6.2f} ms"
    )
    console.print(f"  two bare hops                   p50 {figures['two_hops_ms']:6.2f} ms")
    console.print(f"  the same bytes on disk          p50 {figures['write_ms']:6.2f} ms")
    console.print(f"  ratio {figures['freshness_ratio']:.2f}  (aim 2.2)")
    return figures
