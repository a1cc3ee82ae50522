"""Time to take a model over: three processes of the service on a log of three brokers, all on this machine.

A trainer publishes a few rows at a time, a replica follows. The process that owns the model is killed with
SIGKILL, and the next cut is published at once: how long until it is sealed, and until the replica holds it? Then
that process is started again. In another turn the owner is asked to give the model to another process.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from tests.bench.timing import spread_of

from deltasync.client import (
    Admin,
    Endpoint,
    NumpyTarget,
    Part,
    Position,
    Publisher,
    PublisherOptions,
    ResyncRequired,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)
from deltasync.client.route import Route
from deltasync.core.errors import DeltasyncError
from deltasync.trainer.demo.brokers import Brokers
from deltasync.trainer.demo.processes import Processes
from deltasync.trainer.demo.services import LEASE_SECONDS, Services, shared_log

ROUNDS, ROWS, DIM, CHANGED = 20, 20_000, 16, 100
_MODEL, _CONSUMER, _TOKEN = "bench", "bench", "of the benchmark"
_PATIENCE_SECONDS, _POLL_SECONDS = 120.0, 0.02


def failover_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    return click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(1))(command)


class _Trainer:
    """Publishes some rows at a time, whatever happens to the service."""

    def __init__(self, address: str) -> None:
        self._table, self._random, self._step = TableSpec("rows", ROWS, DIM), np.random.default_rng(0), 0
        self._values = self._random.normal(size=(ROWS, DIM)).astype(np.float32)
        options = PublisherOptions(service=address, model=_MODEL, run="bench", run_started_unix_ns=1)
        self._publisher = Publisher(options, [self._table], [Shard.whole(self._table)])

    def publish(self, *, full: bool = False) -> Position:
        """Have a cut sealed. One that the service lacks the past of is sent with every row."""
        self._step += 1
        while True:
            ids = np.arange(ROWS) if full else np.sort(self._random.choice(ROWS, CHANGED, replace=False))
            self._values[ids] += 1
            rows = [RowBatch.of_table(self._table, ids, self._values[ids])]
            part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
            try:
                return self._publisher.publish(part).result(_PATIENCE_SECONDS)
            except ResyncRequired:
                full = True

    def close(self) -> None:
        self._publisher.close()


class _World:
    """All that runs."""

    def __init__(self, services: Services, trainer: _Trainer, replica: Subscriber) -> None:
        self.services, self.trainer, self.replica = services, trainer, replica
        self._route = Route(Endpoint.of_http(Endpoint(services.http, _TOKEN)))
        self._admin = Admin(Endpoint(services.http, _TOKEN))

    def killed(self) -> tuple[float, float]:
        """Seconds from the owner's end until a cut is sealed, and until the replica holds it."""
        self.services.kill_owner(_MODEL, _TOKEN)
        seconds = self._next_cut()
        self.services.keep_alive()
        self._settle()
        return seconds

    def moved(self) -> tuple[float, float]:
        """The same from when another process was asked to have the model."""
        lines = self._processes()
        others = [line["process"] for line in lines if _MODEL not in line["models"]]
        started = time.perf_counter()
        self._admin.move_model(_MODEL, others[0])
        asked = time.perf_counter() - started
        sealed, held = self._next_cut()
        self._settle()
        return asked + sealed, asked + held

    def _next_cut(self) -> tuple[float, float]:
        started = time.perf_counter()
        position = self.trainer.publish()
        sealed = time.perf_counter() - started
        self.replica.wait_for(position.number, _PATIENCE_SECONDS)
        return sealed, time.perf_counter() - started

    def _settle(self) -> None:
        """Wait until all processes are there, and the model's owner is known to all."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(lines := self._processes()) < len(self.services.names) or not _owned(lines):
            if time.monotonic() > deadline:
                raise DeltasyncError(f"processes are not there again within {_PATIENCE_SECONDS:.0f} s: {lines}")
            time.sleep(_POLL_SECONDS)
        self.replica.wait_for(self.trainer.publish().number, _PATIENCE_SECONDS)

    def _processes(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._route.get_json("/processes")
        except DeltasyncError:  # The one that was asked is not there yet.
            return []
        return found


def _owned(lines: list[dict[str, Any]]) -> bool:
    return sum(_MODEL in line["models"] for line in lines) == 1


def run(console: Console, rounds: int) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with _running() as world:
        killed = [world.killed() for _ in range(rounds)]
        moved = [world.moved() for _ in range(rounds)]
    return _report(console, killed, moved)


@contextmanager
def _running() -> Iterator[_World]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltasync-bench-")))
        brokers = stack.enter_context(Brokers(folder / "brokers", 3))
        processes = stack.enter_context(Processes(folder))
        arguments = [*shared_log(brokers, folder), "--consumer", f"{_CONSUMER}={_MODEL}"]
        services = Services(processes, arguments, 3, _TOKEN)
        trainer = _Trainer(services.grpc)
        stack.callback(trainer.close)
        position = trainer.publish(full=True)
        options = SubscriberOptions(service=services.grpc, consumer=_CONSUMER, replica="bench")
        replica = stack.enter_context(Subscriber(options, NumpyTarget()))
        replica.wait_for(position.number, _PATIENCE_SECONDS)
        yield _World(services, trainer, replica)


def _report(
    console: Console, killed: list[tuple[float, float]], moved: list[tuple[float, float]]
) -> dict[str, Any]:
    named = {
        "takeover_seconds": [sealed for sealed, _ in killed],
        "takeover_held_seconds": [held for _, held in killed],
        "move_seconds": [sealed for sealed, _ in moved],
        "move_held_seconds": [held for _, held in moved],
    }
    figures: dict[str, Any] = {"rounds": len(killed), "lease_seconds": LEASE_SECONDS}
    for name, values in named.items():
        figures |= spread_of(name, values) | {f"{name}_p99": float(np.quantile(values, 0.99))}
    figures["takeover_ratio"] = statistics.median(named["takeover_seconds"]) / LEASE_SECONDS
    console.print(f"failover: {len(killed)} kills and as many moves, lease {LEASE_SECONDS} s")
    for name, what in (("takeover", "owner killed"), ("move", "model moved")):
        sealed, held = f"{name}_seconds", f"{name}_held_seconds"
        console.print(
            f"  {what}: next cut sealed after {figures[sealed]:.2f} s (p99 {figures[f'{sealed}_p99']:.2f}), "
            f"with the replica after {figures[held]:.2f} s (p99 {figures[f'{held}_p99']:.2f})"
        )
    return figures
