"""CPU time of the service for eight consumers with different policies, against the same work in lines of NumPy.

A publisher, a service, and a replica of every consumer in other processes. In each round a few cuts of a twentieth
of the rows are published, each when all replicas have rows of the one before. CPU time is that of the service's
process from one round to the next, and so includes rows that a policy releases later.

The bare figure is CPU time of this process for the same rows, in lines of NumPy on arrays of the same sizes: for
each of the eight, the norms of the changed rows that it follows, and their encoding in its type.

    np.linalg.norm(table[ids] - view[ids], axis=1)
"""

import json
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.children import Children, Peer, publisher
from tests.bench.process import TICK_SECONDS, cpu_seconds, cpu_seconds_by_thread
from tests.bench.timing import ratio_of, spread_of

from deltasync.client import Admin, Endpoint, Mode, Part, Policy, Publisher, RowBatch, TableSpec, ValueType
from deltasync.core.rows import Ids
from deltasync.trainer.example.processes import DemoService

EIGHT = {
    "top-share-int8": Policy(top_k=0.1, value_type=ValueType.INT8),
    "top-share": Policy(top_k=0.1),
    "top-count": Policy(top_k=1000, top_k_per_table=True),
    "bf16": Policy(value_type=ValueType.BF16),
    "ids": Policy(mode=Mode.IDS),
    "interval": Policy(value_type=ValueType.INT8_TBE, min_interval_seconds=0.25),
    "budget": Policy(top_k=0.5, max_bytes=1 << 20, value_type=ValueType.FP16, ready_within_seconds=60),
    "items": Policy(tables=("items*",), top_k=0.01, max_age_seconds=5, value_type=ValueType.INT4_TBE),
}
_MODEL, _TABLES = "bench", ("users", "items")
_CUTS_OF_ALL_ROWS, _CUTS_OF_A_TURN, _REPLICAS_OF_A_PROCESS = 20, 4, 4
# The rows of the first turns are new, and so is the memory they take.
_WARM_UP = 2
_SHOWN_SECONDS = 1e-4

Floats = NDArray[np.float32]
Array = NDArray[Any]


OPTIONS = (
    click.option(
        "--rows", type=click.IntRange(2 * _CUTS_OF_ALL_ROWS), default=250_000, help="Rows of both tables together."
    ),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=10,
        help=f"Rounds, in each of which {_CUTS_OF_A_TURN} cuts are published.",
    ),
)


def run(console: Console, rows: int, dim: int, rounds: int) -> dict[str, Any]:
    tables = [TableSpec(name, rows // len(_TABLES), dim) for name in _TABLES]
    with _running_fleet(tables) as fleet:
        for number in range(_WARM_UP + rounds):
            fleet.turn(counted=number >= _WARM_UP)
        seconds = fleet.cpu_per_version()[_WARM_UP:]
        others = fleet.figures()
    bare = _bare_cpu_per_version(tables)
    figures = {
        **spread_of("eight_ratio", [each / bare for each in seconds]),
        **spread_of("cpu_seconds_per_version", seconds),
        **others,
        "bare_cpu_seconds_per_version": bare,
        "rows": rows,
        "dim": dim,
        "rounds": rounds,
    }
    _print(console, figures)
    return figures


class Fleet:
    """The consumers of a service, and what is published to them."""

    def __init__(
        self,
        service: DemoService,
        publisher: Publisher,
        tables: list[TableSpec],
        replicas: Mapping[tuple[str, ...], Peer],
    ) -> None:
        self._service = service
        self._publisher = publisher
        self._tables = tables
        self._replicas = replicas
        self._values = np.random.default_rng(0)
        self._step = 0
        self._cpu: list[float] = []
        self._threads: dict[str, float] = {}
        self._counted = 0
        self._first = self._cut()

    def turn(self, *, counted: bool) -> None:
        """Publish a few cuts, each once the replicas have the one before."""
        if counted and not self._counted:
            self._threads = cpu_seconds_by_thread(self._service.pid)
        self._counted += _CUTS_OF_A_TURN * counted
        self._cpu.append(cpu_seconds(self._service.pid))
        for _ in range(_CUTS_OF_A_TURN):
            self._forms = self._cut()

    def cpu_per_version(self) -> list[float]:
        """CPU seconds per version, in each turn; none is less than what the kernel's clock can tell."""
        seconds = pairwise([*self._cpu, cpu_seconds(self._service.pid)])
        return [max(after - before, TICK_SECONDS) / _CUTS_OF_A_TURN for before, after in seconds]

    def figures(self) -> dict[str, Any]:
        """What each consumer was given after the first cut, which has all rows, and CPU seconds by thread."""
        delivered = {
            name: {"releases": releases - self._first[name][0], "rows": rows - self._first[name][1]}
            for name, (releases, rows) in self._forms.items()
        }
        return {
            "versions": self._step - 1,
            "thread_cpu_seconds_per_version": self._cpu_by_thread(),
            "consumers": delivered,
        }

    def _cpu_by_thread(self) -> dict[str, float]:
        """CPU seconds per version of each thread, the busiest first."""
        spent = {
            name: (seconds - self._threads.get(name, 0.0)) / self._counted
            for name, seconds in cpu_seconds_by_thread(self._service.pid).items()
        }
        return dict(sorted(spent.items(), key=lambda each: -each[1]))

    def _cut(self) -> dict[str, tuple[int, int]]:
        """Publish a cut; the releases and rows that every replica was given once it has rows of it."""
        rows = [
            RowBatch.of_table(table, ids, self._values.standard_normal((len(ids), table.dim), np.float32))
            for table in self._tables
            for ids in [self._changed(table)]
        ]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=self._step == 0)
        version = self._publisher.publish(part).result().number
        self._step += 1
        delivered: dict[str, tuple[int, int]] = {}
        for names, peer in self._replicas.items():
            delivered |= dict(zip(names, json.loads(peer.ask(str(version))), strict=True))
        return delivered

    def _changed(self, table: TableSpec) -> Ids:
        if self._step == 0:
            return np.arange(table.rows)
        return np.arange(self._step % _CUTS_OF_ALL_ROWS, table.rows, _CUTS_OF_ALL_ROWS)


@contextmanager
def _running_fleet(tables: list[TableSpec]) -> Iterator[Fleet]:
    """A service with a consumer of each policy, and a replica of each, several in a process."""
    token = secrets.token_hex()
    with Children() as children:
        service = children.service(admin_token=token)
        for name, policy in EIGHT.items():
            Admin(Endpoint(service.http, token)).create_consumer(name, _MODEL, policy)
        names, size = tuple(EIGHT), _REPLICAS_OF_A_PROCESS
        groups = [names[start : start + size] for start in range(0, len(names), size)]
        replicas = {group: children.peer("fleet", service.grpc, *group) for group in groups}
        for peer in replicas.values():
            peer.read()
        with publisher(service.grpc, tables) as source:
            yield Fleet(service, source, tables, replicas)


def _bare_cpu_per_version(tables: Sequence[TableSpec]) -> float:
    """CPU seconds of the bare lines for one version, all of the eight policies together."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((2, table.rows, table.dim), np.float32) for table in tables]
    seconds = []
    for first in range(_CUTS_OF_ALL_ROWS):
        started = time.process_time()
        for policy in EIGHT.values():
            for table, (rows, view) in zip(tables, arrays, strict=True):
                if policy.follows(table):
                    ids = np.arange(first, table.rows, _CUTS_OF_ALL_ROWS)
                    np.linalg.norm(rows[ids] - view[ids], axis=1)
                    _encode(rows[ids], policy)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"consumers: cuts of {figures['rows'] // _CUTS_OF_ALL_ROWS:,} of {figures['rows']:,} rows x "
        f"{figures['dim']} fp32, median of {figures['rounds']} rounds of {_CUTS_OF_A_TURN} cuts"
    )
    ours, bare = (1e3 * figures[f"{name}cpu_seconds_per_version"] for name in ("", "bare_"))
    console.print(
        f"  CPU of the service per version {ours:.1f} ms, bare gathers, norms and encodings {bare:.1f} ms: "
        f"{ratio_of(figures, 'eight_ratio')}   (aim: at most 3)"
    )
    spent = figures["thread_cpu_seconds_per_version"].items()
    threads = ", ".join(f"{thread} {1e3 * each:.1f}" for thread, each in spent if each > _SHOWN_SECONDS)
    console.print(f"  ms of threads: {threads}")


def _encode(rows: Floats, policy: Policy) -> Array:
    """Rows [n, D] in the type of a policy: what encoding costs in a few lines of NumPy."""
    if policy.mode is Mode.IDS:
        return rows
    match policy.value_type:
        case ValueType.FP16:
            return rows.astype(np.float16)
        case ValueType.BF16:
            return ((rows.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        case ValueType.INT8 | ValueType.INT8_TBE:
            return _codes(rows, 255)
        case ValueType.INT4_TBE:
            codes = _codes(rows, 15)
            halves: Array = np.bitwise_or(codes[:, ::2], codes[:, 1::2] << np.uint8(4))
            return halves
        case _:
            return rows


def _codes(rows: Floats, steps: int) -> Array:
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    codes: Array = np.rint((rows - low) * (np.float32(steps) / (high - low))).astype(np.uint8)
    return codes
