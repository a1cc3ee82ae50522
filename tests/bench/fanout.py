"""What a further replica of a consumer costs the service.

Two services are published the same cuts, each when all replicas have the one before: one service has a replica,
the other has forty of the same consumer, in other processes. What the second takes more is that of 39 replicas.
"""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console

from deltasync.client import Part, Publisher, PublisherOptions, RowBatch, Shard, TableSpec
from deltasync.core.process import keep_freed_memory
from tests.bench.children import Children
from tests.bench.process import cpu_seconds
from tests.bench.timing import spread_of

ROWS, DIM, CUT_ROWS, REPLICAS = 100_000, 64, 10_000, 40
_REPLICAS_OF_A_PROCESS = 10
WARM_UP, ROUNDS, CUTS_OF_A_ROUND = 1, 7, 8
_TABLE = TableSpec("bench", ROWS, DIM)


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures."""
    keep_freed_memory()
    with ExitStack() as stack:
        fleets = [_Fleet(stack, stack.enter_context(Children()), replicas) for replicas in (1, REPLICAS)]
        for _ in range(WARM_UP + ROUNDS):
            for fleet in fleets:
                fleet.turn()
    one, all_of_them = (fleet.seconds[WARM_UP:] for fleet in fleets)
    return _report(console, one, all_of_them)


class _Fleet:
    """A service, a publisher, and so many replicas of one consumer."""

    def __init__(self, stack: ExitStack, children: Children, replicas: int) -> None:
        service = children.service("--consumer", "bench=bench")
        options = PublisherOptions(
            service=service.grpc, model="bench", run="bench", run_started_unix_ns=time.time_ns()
        )
        self._publisher = stack.enter_context(Publisher(options, [_TABLE], [Shard.whole(_TABLE)]))
        self._pid = service.pid
        self._random, self._step = np.random.default_rng(0), 0
        firsts = range(0, replicas, _REPLICAS_OF_A_PROCESS)
        counts = [str(min(_REPLICAS_OF_A_PROCESS, replicas - first)) for first in firsts]
        self._peers = [
            children.peer("twins", service.grpc, str(first), count)
            for first, count in zip(firsts, counts, strict=True)
        ]
        for peer in self._peers:
            peer.read()
        self._publish(np.arange(ROWS), full=True)
        self.seconds: list[float] = []

    def turn(self) -> None:
        """Publish a few cuts; CPU seconds of the service for each of them."""
        before = cpu_seconds(self._pid)
        for _ in range(CUTS_OF_A_ROUND):
            self._publish(np.sort(self._random.choice(ROWS, CUT_ROWS, replace=False)))
        self.seconds.append((cpu_seconds(self._pid) - before) / CUTS_OF_A_ROUND)

    def _publish(self, ids: Any, *, full: bool = False) -> None:
        self._step += 1
        values = self._random.normal(size=(len(ids), DIM)).astype(np.float32)
        rows = [RowBatch.of_table(_TABLE, ids, values)]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
        version = self._publisher.publish(part).result().number
        for peer in self._peers:
            peer.ask(str(version))


def _report(console: Console, one: list[float], all_of_them: list[float]) -> dict[str, Any]:
    further = [(many - single) / (REPLICAS - 1) for many, single in zip(all_of_them, one, strict=True)]
    megabytes = CUT_ROWS * _TABLE.row_bytes / 1e6
    figures = {
        **spread_of("cpu_ms_per_version_of_one", (1e3 * each for each in one)),
        **spread_of("cpu_ms_per_version_of_all", (1e3 * each for each in all_of_them)),
        **spread_of("cpu_ms_per_further_replica", (1e3 * each for each in further)),
        **spread_of("fanout_ratio", (each / single for each, single in zip(further, one, strict=True))),
        "replicas": REPLICAS,
        "megabytes_per_version": megabytes,
        "rounds": len(one),
    }
    console.print(f"fanout: cuts of {CUT_ROWS:,} rows x {DIM} fp32, {megabytes:.1f} MB; service CPU per version")
    console.print(f"  one replica             {figures['cpu_ms_per_version_of_one']:8.2f} ms")
    console.print(f"  {REPLICAS} replicas             {figures['cpu_ms_per_version_of_all']:8.2f} ms")
    console.print(
        f"  each further replica    {figures['cpu_ms_per_further_replica']:8.2f} ms   "
        f"ratio {figures['fanout_ratio']:.2f} of the first's"
    )
    return figures
