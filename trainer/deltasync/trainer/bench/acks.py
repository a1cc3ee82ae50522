"""What the acknowledgements of a fleet cost the cuts.

Two services are published the same small cuts by turns: one has no replicas, the other has 200 of one consumer, in
another process, each of which acknowledges every version at some time before the next one. The time of a seal is
that from the part, which a small cut's close comes with, to the answer that the cut is sealed.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click
import numpy as np
from rich.console import Console

from deltasync.client import Part, Publisher, PublisherOptions, RowBatch, Shard, TableSpec
from deltasync.trainer.bench.children import Children
from deltasync.trainer.bench.process import cpu_seconds
from deltasync.trainer.bench.timing import spread_of

ROWS, DIM, CUT_ROWS, REPLICAS = 10_000, 16, 200, 200
# From a cut of one of the services to the next one of it.
_INTERVAL_SECONDS = 1.0
WARM_UP, ROUNDS, CUTS = 1, 9, 6
_TABLE = TableSpec("bench", ROWS, DIM)


def acks_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for option in (
        click.option("--replicas", default=REPLICAS, show_default=True, type=click.IntRange(1)),
        click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(1)),
    ):
        command = option(command)
    return command


def run(console: Console, replicas: int, rounds: int) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with ExitStack() as stack:
        without, with_acks = (_Cuts(stack, stack.enter_context(Children()), count) for count in (0, replicas))
        found = [_round(without, with_acks) for _ in range(WARM_UP + rounds)][WARM_UP:]
    return _report(console, found, replicas)


class _Cuts:
    """A service, who publishes cuts to it, and so many replicas that acknowledge them."""

    def __init__(self, stack: ExitStack, children: Children, replicas: int) -> None:
        service = children.service("--consumer", "bench=bench")
        options = PublisherOptions(
            service=service.grpc, model="bench", run="bench", run_started_unix_ns=time.time_ns()
        )
        self._publisher = stack.enter_context(Publisher(options, [_TABLE], [Shard.whole(_TABLE)]))
        self._pid = service.pid
        self._random, self._step = np.random.default_rng(0), 0
        self.seal(np.arange(ROWS), full=True)
        arguments = ("acks", service.grpc, str(replicas), str(_INTERVAL_SECONDS))
        self._fleet = children.peer(*arguments) if replicas else None
        if self._fleet:
            self._fleet.read()

    @property
    def acks(self) -> int:
        """How many acknowledgements its replicas have sent."""
        return int(self._fleet.ask("acks")) if self._fleet else 0

    @property
    def cpu_seconds(self) -> float:
        """Of the service."""
        return cpu_seconds(self._pid)

    def seal(self, ids: Any = None, *, full: bool = False) -> float:
        """Publish a cut; seconds until it is sealed."""
        self._step += 1
        if ids is None:
            ids = np.sort(self._random.choice(ROWS, CUT_ROWS, replace=False))
        values = self._random.normal(size=(len(ids), DIM)).astype(np.float32)
        rows = [RowBatch.of_table(_TABLE, ids, values)]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
        started = time.perf_counter()
        self._publisher.publish(part).result()
        return time.perf_counter() - started


def _round(without: _Cuts, with_acks: _Cuts) -> dict[str, float]:
    """The median time of a seal of both, and what the acknowledgements are meanwhile."""
    begun, acks, cpu = time.perf_counter(), with_acks.acks, with_acks.cpu_seconds
    seconds = list[tuple[float, float]]()
    for number in range(CUTS):
        taken = list[float]()
        for half, each in enumerate((without, with_acks)):
            due = begun + (number + half / 2) * _INTERVAL_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))
            taken.append(each.seal())
        seconds.append((taken[0], taken[1]))
    passed = time.perf_counter() - begun
    medians = [float(np.median(each)) for each in zip(*seconds, strict=True)]
    return {
        "without": medians[0],
        "with": medians[1],
        "acks": (with_acks.acks - acks) / passed,
        "cpu": (with_acks.cpu_seconds - cpu) / passed,
    }


def _report(console: Console, found: list[dict[str, float]], replicas: int) -> dict[str, Any]:
    figures = {
        **spread_of("seal_ratio", (each["with"] / each["without"] for each in found)),
        **spread_of("seal_ms", (1e3 * each["with"] for each in found)),
        **spread_of("seal_ms_without", (1e3 * each["without"] for each in found)),
        **spread_of("acks_per_second", (each["acks"] for each in found)),
        **spread_of("service_cpu_share", (each["cpu"] for each in found)),
        "replicas": replicas,
        "rounds": len(found),
    }
    console.print(
        f"acks: cuts of {CUT_ROWS} rows x {DIM}, one every {_INTERVAL_SECONDS:g} s; median of {len(found)} rounds"
    )
    console.print(f"  no replicas             {figures['seal_ms_without']:8.2f} ms until it is sealed")
    console.print(f"  {replicas} replicas            {figures['seal_ms']:8.2f} ms")
    console.print(
        f"  ratio                   {figures['seal_ratio']:8.2f} ({figures['seal_ratio_low']:.2f} to "
        f"{figures['seal_ratio_high']:.2f}; aim: at most 1.2)"
    )
    console.print(
        f"  meanwhile {figures['acks_per_second']:.0f} acknowledgements a second come, and the service takes "
        f"{100 * figures['service_cpu_share']:.0f} % of a core"
    )
    return figures
