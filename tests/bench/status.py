"""What it costs to ask how far replicas are behind.

The time of a cut, from publish to sealed and applied in a replica: without scrapes, with 200 a second of /metrics
and /lag from another process, and with as many of /livez, which is what HTTP alone takes. The three take turns.
One consumer has everything, another has nothing, so that all rows count.

And a service with many tables and consumers: how long /metrics takes, and the largest gap that this tears into the
event loop, which is the longest time that /livez takes meanwhile, asked for again and again.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console

from deltasync.client import Part, Publisher, PublisherOptions, RowBatch, Shard, TableSpec
from tests.bench.children import Children, Peer
from tests.bench.scraper import connection_to, fetch
from tests.bench.timing import spread_of
from tests.bench.watched import PER_SECOND as SCRAPES
from tests.bench.watched import STREAMS, measure

PER_SECOND = 200
TABLES, ROWS, DIM, CUT_ROWS = 20, 100_000, 8, 100
MANY_TABLES, MANY_CONSUMERS, ANSWERS = 1_000, 40, 5
WARM_UP, ROUNDS, CUTS = 1, 8, 25
_PAGES = {
    "none": "",
    "status": "/metrics /consumers/bench/lag /consumers/away/lag",
    "livez": "/livez /livez /livez",
}


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with Children() as children:
        rounds = _cuts(children)
    with Children() as children:
        many = _many(children)
    with Children() as children:
        watched = _watched(children)
    figures = {
        **spread_of("cut_ratio", [each["watched"] / each["alone"] for each in watched]),
        **spread_of("cpu_ratio", [each["watched_cpu"] / each["alone_cpu"] for each in watched]),
        "own_cpu_seconds": statistics.median(each["own_cpu"] for each in watched),
        **spread_of("cut_time_ratio", [each["status"] / each["none"] for each in rounds]),
        **spread_of("cut_time_ratio_to_livez", [each["status"] / each["livez"] for each in rounds]),
        **{f"{name}_cut_seconds": statistics.median(each[name] for each in rounds) for name in _PAGES},
        "scrapes_per_second": statistics.median(each["scrapes"] for each in rounds),
        **many,
    }
    _print(console, figures)
    return figures


class Cuts:
    """Cuts of a few rows of each of some tables."""

    def __init__(self, publisher: Publisher, tables: list[TableSpec]) -> None:
        self._publisher = publisher
        self._tables = tables
        self._values = np.random.default_rng(0)
        self._step = 0

    def publish(self, rows: int) -> int:
        """Publish so many rows of each table; the version, once it is sealed."""
        self._step += 1
        batches = [
            RowBatch.of_table(
                table,
                np.sort(self._values.choice(table.rows, rows, replace=False)),
                self._values.standard_normal((rows, table.dim), np.float32),
            )
            for table in self._tables
        ]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=batches, full=self._step == 1)
        return self._publisher.publish(part).result().number


def _publisher(service: str, tables: list[TableSpec]) -> Publisher:
    options = PublisherOptions(service=service, model="bench", run="bench", run_started_unix_ns=time.time_ns())
    return Publisher(options, tables, [Shard.whole(table) for table in tables])


def _cuts(children: Children) -> list[dict[str, float]]:
    """The median time of a cut in each turn of each round, and how many scrapes of status a second there were."""
    service = children.service("--consumer", "bench=bench", "--consumer", "away=bench")
    replica, scraper = children.peer("replica", service.grpc), children.peer("scraper", service.http)
    replica.read()
    tables = [TableSpec(f"table-{number}", ROWS, DIM) for number in range(TABLES)]
    with _publisher(service.grpc, tables) as publisher:
        cuts = Cuts(publisher, tables)
        replica.ask(str(cuts.publish(ROWS)))
        return [_round(cuts, replica, scraper) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]


def _watched(children: Children) -> list[dict[str, float]]:
    """What it costs to be watched."""
    service = children.service("--consumer", "bench=bench", "--consumer", "away=bench")
    replica, watcher = children.peer("replica", service.grpc), children.peer("scraper", service.http)
    replica.read()
    tables = [TableSpec(f"table-{number}", ROWS, DIM) for number in range(TABLES)]
    with _publisher(service.grpc, tables) as publisher:
        cuts = Cuts(publisher, tables)
        replica.ask(str(cuts.publish(ROWS)))
        return measure(cuts, CUT_ROWS, watcher, service.pid)


def _round(cuts: Cuts, replica: Peer, scraper: Peer) -> dict[str, float]:
    found = {}
    for name, pages in _PAGES.items():
        if pages:
            scraper.ask(f"start {PER_SECOND} {pages}")
        found[name] = statistics.median(_cut(cuts, replica) for _ in range(CUTS))
        if pages:
            answers = float(scraper.ask("stop"))
            found |= {"scrapes": answers} if name == "status" else {}
    return found


def _cut(cuts: Cuts, replica: Peer) -> float:
    started = time.perf_counter()
    replica.ask(str(cuts.publish(CUT_ROWS)))
    return time.perf_counter() - started


def _many(children: Children) -> dict[str, float]:
    """Seconds of /metrics with many tables and consumers, and the longest of /livez meanwhile and without."""
    names = [word for number in range(MANY_CONSUMERS) for word in ("--consumer", f"c{number}=bench")]
    service = children.service(*names)
    tables = [TableSpec(f"table-{number}", 10, 1) for number in range(MANY_TABLES)]
    with _publisher(service.grpc, tables) as publisher:
        Cuts(publisher, tables).publish(10)
    scraper = children.peer("scraper", service.http)
    address = urlsplit(service.http).netloc
    scraper.ask("fetch /metrics")
    alone = _longest(address, 1.0)
    scraper.ask("start 1000 /metrics")
    gap = _longest(address, 5.0)
    scraper.ask("stop")
    seconds = statistics.median(float(scraper.ask("fetch /metrics")) for _ in range(ANSWERS))
    return {"metrics_seconds": seconds, "longest_gap_seconds": gap, "longest_gap_alone_seconds": alone}


def _longest(address: str, seconds: float) -> float:
    """The longest of the answers of /livez, asked for one after the other for so many seconds."""
    connection, ends = connection_to(address), time.perf_counter() + seconds
    longest = 0.0
    while time.perf_counter() < ends:
        longest = max(longest, fetch(connection, "/livez"))
    connection.close()
    return longest


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    console.print(
        f"status: cuts of {TABLES * CUT_ROWS:,} of {TABLES * ROWS:,} rows, {ROUNDS} rounds of {CUTS} cuts, medians"
    )
    for name, says in (
        ("none", "nobody asks"),
        ("livez", f"{PER_SECOND} times /livez a second"),
        ("status", f"{figures['scrapes_per_second']:.0f} times /metrics and /lag a second"),
    ):
        console.print(f"  {says:<40} {1e3 * figures[f'{name}_cut_seconds']:>6.1f} ms a cut")
    for name, says in (("cut_time_ratio", "nobody asking"), ("cut_time_ratio_to_livez", "/livez")):
        console.print(
            f"  ratio of the last to {says:<19} {figures[name]:>6.2f} ({figures[f'{name}_low']:.2f} to "
            f"{figures[f'{name}_high']:.2f})"
        )
    for name, says in (("cut_ratio", "time from publish to sealed"), ("cpu_ratio", "the service's CPU of a cut")):
        console.print(
            f"  {says}, {STREAMS} pages open and {SCRAPES} scrapes a second, over nobody: {figures[name]:.2f} "
            f"({figures[f'{name}_low']:.2f} to {figures[f'{name}_high']:.2f})"
        )
    console.print(
        f"{MANY_TABLES:,} tables, {MANY_CONSUMERS} consumers: /metrics takes "
        f"{1e3 * figures['metrics_seconds']:.0f} ms; meanwhile /livez takes at most "
        f"{1e3 * figures['longest_gap_seconds']:.0f} ms "
        f"({1e3 * figures['longest_gap_alone_seconds']:.0f} ms without)"
    )
