"""What a cut costs by the size of the table: the same rows into a large one and into a small one.

Each of the two has a service, a publisher and a replica of its own. Their cuts take turns, one by one, each when
the replica has rows of the one before, and after each pair both are asked for lag. That is done with a consumer
that is sent everything and with one that is sent the tenth that has changed most, and with rows of two kinds: any,
and a few far more often than others, as in Zipf's law with the exponent 0.9, wherever in the table they are. A
figure is the worse of the two.
"""

import http.client
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
from rich.console import Console
from tests.bench.children import Children, Peer, publisher
from tests.bench.process import TICK_SECONDS, cpu_seconds
from tests.bench.timing import spread_of

from deltasync.client import Admin, Endpoint, Part, Policy, Publisher, RowBatch, TableSpec
from deltasync.core.rows import Ids

POLICIES = {"": Policy(), "topk_": Policy(top_k=0.1)}
_SAYS = {"": "everything", "topk_": "top-k 10 %"}
_MODEL = "bench"
# Of a row's chance to be drawn, by its rank.
_ZIPF = 0.9
# Ranks times this, modulo the table's rows, is where in the table they are.
_SCATTER = 2_654_435_761
# The first cut has every row, and the checkpoint that it would cause would count as CPU of the cuts after it.
_CHECKPOINT_BYTES = 15 << 30
# The first cuts touch pages and memory for the first time, and the rows that a policy leaves are few.
_WARM_UP = 20
_PUBLISHED_AT_ONCE = 1_000_000
_ANSWER_SECONDS = 60.0


OPTIONS = (
    click.option(
        "--rows",
        type=click.IntRange(1),
        default=50_000_000,
        help="Rows of the large table; 50 M rows x 16 need 20 GB of memory.",
    ),
    click.option("--small-rows", type=click.IntRange(1), default=500_000, help="Rows of the small table."),
    click.option("--dim", type=click.IntRange(1), default=16, help="Values of a row."),
    click.option("--cut-rows", type=click.IntRange(1), default=10_000, help="Rows of a cut."),
    click.option(
        "--rounds", type=click.IntRange(1), default=100, help="Cuts into each table, of each kind of rows."
    ),
)


def run(console: Console, rows: int, small_rows: int, dim: int, cut_rows: int, rounds: int) -> dict[str, Any]:
    sizes = {"small": TableSpec("small", small_rows, dim), "large": TableSpec("large", rows, dim)}
    found = {name: _measure(policy, sizes, cut_rows, rounds) for name, policy in POLICIES.items()}
    worst = {f"scale_{name}ratio": max(each["ratio"] for each in kinds.values()) for name, kinds in found.items()}
    lag = max(each["lag_ratio"] for kinds in found.values() for each in kinds.values())
    figures = {**worst, "scale_lag_ratio": lag, "rows": rows, "small_rows": small_rows, "dim": dim}
    figures |= {"cut_rows": cut_rows, "rounds": rounds, "policies": {_SAYS[name]: found[name] for name in found}}
    _print(console, figures)
    return figures


def uniform(generator: np.random.Generator, rows: int, count: int) -> Ids:
    """So many of a table's rows, each as likely as any other, ascending."""
    return np.sort(generator.choice(rows, count, replace=False))


def zipf(generator: np.random.Generator, rows: int, count: int) -> Ids:
    """So many of a table's rows, ascending, drawn by Zipf's law until they are so many different ones."""
    ids = np.zeros(0, np.int64)
    while len(ids) < count:
        drawn = generator.random(count - len(ids)) ** (1 / (1 - _ZIPF))
        ids = np.union1d(ids, (drawn * rows).astype(np.int64) * _SCATTER % rows)
    return ids


_KINDS = {"uniform": uniform, "zipf": zipf}


class SizedTable:
    """The table of one service, into which cuts are made."""

    def __init__(self, spec: TableSpec, service: int, http_url: str, publisher: Publisher, replica: Peer) -> None:
        self.spec = spec
        self._service = service
        self._connection = http.client.HTTPConnection(urlsplit(http_url).netloc, timeout=_ANSWER_SECONDS)
        self._publisher = publisher
        self._replica = replica
        self._generator = np.random.default_rng(0)
        self._step = 0
        self.change_all()

    def cut(self, ids: Ids) -> float:
        """Give some rows other values: seconds from publish to applied."""
        values = self._generator.standard_normal((len(ids), self.spec.dim), np.float32)
        return self._publish([RowBatch.of_table(self.spec, ids, values)], full=False)

    def lag(self) -> float:
        """Ask for the lag of its consumer: seconds until it is there."""
        started = time.perf_counter()
        self._connection.request("GET", f"/consumers/{_MODEL}")
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"the consumer's status is answered with {answer.status}")
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._service)

    def change_all(self) -> None:
        """Give all rows other values, in a cut of their own."""
        size, rows = _PUBLISHED_AT_ONCE, self.spec.rows
        values = self._generator.standard_normal((min(size, rows), self.spec.dim), np.float32)
        every = [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
        self._publish([RowBatch.of_table(self.spec, ids, values[: len(ids)]) for ids in every], full=True)

    def _publish(self, rows: list[RowBatch], *, full: bool) -> float:
        self._step += 1
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
        started = time.perf_counter()
        version = self._publisher.publish(part).result().number
        self._replica.ask(str(version))
        return time.perf_counter() - started


@contextmanager
def _served(spec: TableSpec, policy: Policy) -> Iterator[SizedTable]:
    token = secrets.token_hex()
    with Children() as children:
        service = children.service("--checkpoint-bytes", str(_CHECKPOINT_BYTES), admin_token=token)
        Admin(Endpoint(service.http, token)).create_consumer(_MODEL, _MODEL, policy)
        replica = children.peer("fleet", service.grpc, _MODEL)
        replica.read()
        with publisher(service.grpc, [spec]) as source:
            yield SizedTable(spec, service.pid, service.http, source, replica)


def _measure(policy: Policy, sizes: dict[str, TableSpec], cut_rows: int, rounds: int) -> dict[str, Any]:
    """The figures of one consumer, by kind of rows."""
    with ExitStack() as stack:
        tables = {name: stack.enter_context(_served(spec, policy)) for name, spec in sizes.items()}
        return {kind: _of_kind(kind, tables, cut_rows, rounds) for kind in _KINDS}


def _of_kind(kind: str, tables: dict[str, SizedTable], cut_rows: int, rounds: int) -> dict[str, float]:
    generators = {name: np.random.default_rng(1) for name in tables}

    def turn(number: int) -> dict[str, tuple[float, float]]:
        """Seconds of a cut into each table, and of its lag."""
        drawn = {name: _KINDS[kind](generators[name], each.spec.rows, cut_rows) for name, each in tables.items()}
        order = list(tables)[:: 1 if number % 2 else -1]  # Neither is always the first.
        cuts = {name: tables[name].cut(drawn[name]) for name in order}
        return {name: (cuts[name], tables[name].lag()) for name in order}

    for number in range(_WARM_UP):
        turn(number)
    before = {name: each.cpu_seconds() for name, each in tables.items()}
    turns = [turn(number) for number in range(rounds)]
    spent = {name: each.cpu_seconds() - before[name] for name, each in tables.items()}
    cpu = {name: max(seconds, TICK_SECONDS) / rounds for name, seconds in spent.items()}
    return {
        **spread_of("ratio", [each["large"][0] / each["small"][0] for each in turns]),
        **spread_of("lag_ratio", [each["large"][1] / each["small"][1] for each in turns]),
        "cpu_ratio": cpu["large"] / cpu["small"],
        **{f"{name}_cpu_seconds": seconds for name, seconds in cpu.items()},
        **{f"{name}_cut_seconds": statistics.median(each[name][0] for each in turns) for name in tables},
        **{f"{name}_lag_seconds": statistics.median(each[name][1] for each in turns) for name in tables},
    }


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"scale: cuts of {figures['cut_rows']:,} rows x {figures['dim']} fp32 into {figures['rows']:,} rows and "
        f"into {figures['small_rows']:,}, medians of {figures['rounds']}"
    )
    console.print("  consumer    rows         publish to applied          service CPU              /lag")
    for policy, kinds in figures["policies"].items():
        for kind, found in kinds.items():
            columns = [
                f"{1e3 * found[f'large_{what}_seconds']:6.1f} {1e3 * found[f'small_{what}_seconds']:6.1f} ms "
                f"ratio {found[ratio]:.2f}"
                for what, ratio in (("cut", "ratio"), ("cpu", "cpu_ratio"), ("lag", "lag_ratio"))
            ]
            console.print(f"  {policy:<10}  {kind:<7}  {'   '.join(columns)}")
    for name in ("scale_ratio", "scale_topk_ratio", "scale_lag_ratio"):
        console.print(f"  {name:<16}  {figures[name]:.2f}  (aim 2)")
