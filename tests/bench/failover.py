"""Time to take a model over: three processes of the service on a log of three brokers, all on this machine.

A trainer publishes a few rows at a time, a replica follows. The process that owns the model is killed with
SIGKILL, and the next cut is published at once: how long until it is sealed, and until the replica holds it? Then
that process is started again. In another turn the owner is asked to give the model to another process.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from tests.bench.timing import spread_of
from tests.support.cluster import MODEL, Cluster
from tests.support.process import ADMIN_TOKEN, ServiceProcess

from deltasync.base.errors import DeltasyncError
from deltasync.client import Admin, Endpoint

ROUNDS, CHANGED, LEASE_SECONDS = 20, 100, 3
_PATIENCE_SECONDS, _POLL_SECONDS = 120.0, 0.02


OPTIONS = (click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(1)),)


class _World:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._trainer = cluster.trainer()
        self._trainer.publish()
        self._replica, _ = cluster.replica("bench")
        self._settle()

    def killed(self) -> tuple[float, float]:
        """Seconds from the owner's end until a cut is sealed, and until the replica holds it."""
        owner = self._cluster.owner()
        owner.kill()
        seconds = self._next_cut()
        owner.start(announced=False)
        owner.wait_until_announced()
        self._settle()
        return seconds

    def moved(self) -> tuple[float, float]:
        """The same from the request to move the model to another process."""
        owner = self._cluster.owner()
        other = next(each for each in self._cluster.services if each is not owner)
        started = time.perf_counter()
        Admin(Endpoint(owner.http, ADMIN_TOKEN)).move_model(MODEL, self._cluster.name_of(other))
        asked = time.perf_counter() - started
        sealed, held = self._next_cut()
        self._settle()
        return asked + sealed, asked + held

    def _next_cut(self) -> tuple[float, float]:
        started = time.perf_counter()
        position = self._trainer.publish(CHANGED)
        sealed = time.perf_counter() - started
        self._replica.wait_for(position.number, _PATIENCE_SECONDS)
        return sealed, time.perf_counter() - started

    def _settle(self) -> None:
        """Wait until all processes are there, and know the model's owner."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not all(map(self._knows_all, self._cluster.services)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes are not there again within {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        self._replica.wait_for(self._trainer.publish(CHANGED).number, _PATIENCE_SECONDS)

    def _knows_all(self, service: ServiceProcess) -> bool:
        try:
            lines = service.get_json("/processes")
        except (OSError, DeltasyncError, ValueError):  # It does not answer yet.
            return False
        alive = [line for line in lines if line["alive"]]  # One that was killed is so for as long as its lease.
        return len(alive) == len(self._cluster.services) and sum(MODEL in line["models"] for line in alive) == 1


def run(console: Console, rounds: int) -> dict[str, Any]:
    lease = ["--lease-seconds", str(LEASE_SECONDS), "--log-level", "error"]
    with (
        tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder,
        Cluster(Path(folder), arguments=lease) as cluster,
    ):
        world = _World(cluster)
        killed = [world.killed() for _ in range(rounds)]
        moved = [world.moved() for _ in range(rounds)]
    return _report(console, killed, moved)


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
