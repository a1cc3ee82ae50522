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
from tests.bench.children import Children
from tests.bench.process import cpu_seconds
from tests.bench.timing import spread_of

ROWS, DIM, CUT_ROWS, REPLICAS = 10_000, 16, 200, 200
# From a cut of one of the services to the next one of it.
_INTERVAL_SECONDS = 0.5
WARM_UP, CUTS = 5, 60
_TABLE = TableSpec("bench", ROWS, DIM)


def acks_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for option in (
        click.option("--replicas", default=REPLICAS, show_default=True, type=click.IntRange(1)),
        click.option("--cuts", default=CUTS, show_default=True, type=click.IntRange(1)),
    ):
        command = option(command)
    return command


def run(console: Console, replicas: int, cuts: int) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with ExitStack() as stack:
        without, with_acks = (_Cuts(stack, stack.enter_context(Children()), count) for count in (0, replicas))
        _by_turns(without, with_acks, WARM_UP)
        begun, acks, cpu = time.perf_counter(), with_acks.acks, with_acks.cpu_seconds
        pairs = _by_turns(without, with_acks, cuts)
        passed = time.perf_counter() - begun
        acks, cpu = with_acks.acks - acks, with_acks.cpu_seconds - cpu
    return _report(console, pairs, replicas, acks / passed, cpu / passed)


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


def _by_turns(without: _Cuts, with_acks: _Cuts, cuts: int) -> list[tuple[float, float]]:
    """Seconds of so many seals of both, each at its time."""
    begun, pairs = time.perf_counter(), list[tuple[float, float]]()
    for number in range(cuts):
        time.sleep(max(0.0, begun + number * _INTERVAL_SECONDS - time.perf_counter()))
        alone = without.seal()
        time.sleep(_INTERVAL_SECONDS / 2)
        pairs.append((alone, with_acks.seal()))
    return pairs


def _report(
    console: Console, pairs: list[tuple[float, float]], replicas: int, acks: float, cpu: float
) -> dict[str, Any]:
    figures = {
        **spread_of("seal_ratio", (with_acks / alone for alone, with_acks in pairs)),
        **spread_of("seal_ms", (1e3 * with_acks for _, with_acks in pairs)),
        **spread_of("seal_ms_without", (1e3 * alone for alone, _ in pairs)),
        "acks_per_second": acks,
        "service_cpu_share": cpu,
        "replicas": replicas,
        "cuts": len(pairs),
    }
    console.print(
        f"acks: cuts of {CUT_ROWS} rows x {DIM}, one every {_INTERVAL_SECONDS:g} s; {len(pairs)} of them"
    )
    console.print(f"  no replicas             {figures['seal_ms_without']:8.2f} ms until it is sealed")
    console.print(f"  {replicas} replicas            {figures['seal_ms']:8.2f} ms")
    console.print(
        f"  ratio                   {figures['seal_ratio']:8.2f} ({figures['seal_ratio_low']:.2f} to "
        f"{figures['seal_ratio_high']:.2f}; aim: at most 1.2)"
    )
    console.print(
        f"  meanwhile {acks:.0f} acknowledgements a second come, and the service takes {100 * cpu:.0f} % of a core"
    )
    return figures
