"""Throughput of the log: records of about 1 MB to one broker and to three, against LMDB.

Each log is given the same records by turns, and waited for until the last of them is durable; then they are
truncated. Brokers sync to disk what they acknowledge; of three each keeps every record. All are on this machine
and share its cores and its disk: of brokers on machines of their own the figures say little.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from deltasync.core.owner import Owner
from deltasync.storage.brokers import BrokerOptions
from deltasync.storage.jetstream_logs import JetStreamLogs
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions, LogStore
from tests.bench.timing import spread_of
from deltasync.trainer.demo.brokers import Brokers

RECORD_BYTES, RECORDS, ROUNDS, WARM_UP = 1_000_000, 100, 7, 1
_MAX_BYTES = 4 << 30
_STREAM = "cuts/bench"


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for option in (
        click.option("--records", default=RECORDS, show_default=True, type=click.IntRange(1)),
        click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(1)),
    ):
        command = option(command)
    return command


def run(console: Console, records: int, rounds: int) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltasync-bench-")))
        logs = [
            stack.enter_context(_embedded(folder / "lmdb")),
            stack.enter_context(_of_brokers(folder / "one", 1)),
            stack.enter_context(_of_brokers(folder / "three", 3)),
        ]
        record = np.random.default_rng(0).bytes(RECORD_BYTES)
        turns = [[_rate(log, number, record, records) for log in logs] for number in range(WARM_UP + rounds)]
    return _report(console, turns[WARM_UP:], records)


@contextmanager
def _embedded(folder: Path) -> Iterator[LogStore]:
    log = LmdbStore(LogOptions(directory=folder, max_bytes=_MAX_BYTES))
    try:
        yield log
    finally:
        log.close()


@contextmanager
def _of_brokers(folder: Path, count: int) -> Iterator[LogStore]:
    with Brokers(folder, count) as brokers:
        logs = JetStreamLogs(BrokerOptions(urls=brokers.urls, replicas=count, max_bytes=_MAX_BYTES), "bench")
        try:
            yield logs.open("bench", Owner("bench", "", ""))
        finally:
            logs.close()


def _rate(log: LogStore, number: int, record: bytes, records: int) -> float:
    """Bytes a second of so many records, which are gone then."""
    started = time.perf_counter()
    writes = [log.append(_STREAM, number + 1, 0, index, record) for index in range(records)]
    for write in writes:
        write.result()
    seconds = time.perf_counter() - started
    log.truncate(_STREAM, number + 1).result()
    return records * len(record) / seconds


def _report(console: Console, turns: list[list[float]], records: int) -> dict[str, Any]:
    figures = {
        **spread_of("jetstream_ratio", (one / lmdb for lmdb, one, _ in turns)),
        **spread_of("jetstream3_ratio", (three / lmdb for lmdb, _, three in turns)),
        **spread_of("lmdb_mb_s", (lmdb / 1e6 for lmdb, _, _ in turns)),
        **spread_of("jetstream_mb_s", (one / 1e6 for _, one, _ in turns)),
        **spread_of("jetstream3_mb_s", (three / 1e6 for _, _, three in turns)),
        "records": records,
        "rounds": len(turns),
    }
    console.print(f"log: {records} records of {RECORD_BYTES / 1e6:g} MB at once, {len(turns)} rounds")
    console.print(f"  LMDB                    {figures['lmdb_mb_s']:8.0f} MB/s")
    for name, what in (("jetstream", "one broker  "), ("jetstream3", "three brokers")):
        low, high = figures[f"{name}_ratio_low"], figures[f"{name}_ratio_high"]
        console.print(
            f"  {what:13}           {figures[f'{name}_mb_s']:8.0f} MB/s, ratio {figures[f'{name}_ratio']:.2f} "
            f"({low:.2f} to {high:.2f})"
        )
    return figures
