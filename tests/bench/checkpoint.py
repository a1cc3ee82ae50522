"""What checkpoints cost: the cuts meanwhile, the bytes that are written, and the time until one is loaded.

cut_ratio    The time from publish to applied of a cut while a checkpoint is written, over that of a cut without.
             Before each checkpoint all rows change, so that it has all of them.
write_ratio  The bytes that checkpoints write, new bases included, over the ids and values of the rows that change,
             while random rows change until they are five times the table. A checkpoint follows each tenth of it.
load_ratio   The time to load a checkpoint into new tables, over that of reading its files into new memory, one
             after the other. The system has the files in memory, as after the kill of a process, and, for
             `load_cold_ratio`, has to read them from the disk, as after a power cut.
"""

import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.console import Console
from tests.bench.children import Children, publisher
from tests.bench.scale import SizedTable, uniform
from tests.bench.timing import spread_of

from deltasync.checkpoints.chunks import LogRecord
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest, TableKey
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source, SourceTable
from deltasync.client import Admin, Endpoint, RowBatch, TableSpec
from deltasync.core.position import Position
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import spec_record

_MODEL = "bench"
_TIMES, _OF_A_CHECKPOINT = 5, 0.1
_WARM_UP = 20
# Only those that are asked for are written.
_NONE_BY_ITSELF = ("--checkpoint-bytes", str(16 << 30), "--checkpoint-seconds", "86400")
_AT_ONCE = 100_000
# An id, a stamp and a digest.
_ROW_BYTES = 24


OPTIONS = (
    click.option("--rows", type=click.IntRange(100), default=2_000_000, help="Rows of the table that changes."),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option("--cut-rows", type=click.IntRange(1), default=10_000, help="Rows of a cut that is timed."),
    click.option("--rounds", type=click.IntRange(1), default=5, help="Checkpoints during which cuts are timed."),
    click.option(
        "--load-gb",
        type=click.FloatRange(0, min_open=True),
        default=4.0,
        help="Size of the checkpoint that is loaded, GB: needs three times as much memory, and as much disk.",
    ),
)


def run(console: Console, rows: int, dim: int, cut_rows: int, rounds: int, load_gb: float) -> dict[str, Any]:
    spec = TableSpec("bench", rows, dim)
    with _served(spec) as (table, admin):
        figures = _cuts(table, admin, min(cut_rows, rows), rounds)
    with _served(spec) as (table, admin):
        figures |= _written(table, admin)
    figures |= _loaded(TableSpec("bench", max(1, int(load_gb * 1e9 / (_ROW_BYTES + 4 * dim))), dim), rounds)
    figures |= {"rows": rows, "dim": dim, "cut_rows": min(cut_rows, rows), "rounds": rounds}
    _print(console, figures)
    return figures


@contextmanager
def _served(spec: TableSpec) -> Iterator[tuple[SizedTable, Admin]]:
    """The table of a service that has a replica."""
    token = secrets.token_hex()
    with Children() as children:
        service = children.service("--consumer", f"{_MODEL}={_MODEL}", *_NONE_BY_ITSELF, admin_token=token)
        replica = children.peer("fleet", service.grpc, _MODEL)
        replica.read()
        with publisher(service.grpc, [spec]) as source:
            yield (
                SizedTable(spec, service.pid, service.http, source, replica),
                Admin(Endpoint(service.http, token)),
            )


def _cuts(table: SizedTable, admin: Admin, cut_rows: int, rounds: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    admin.make_checkpoint(_MODEL)
    without, meanwhile, taken = list[list[float]](), list[list[float]](), list[float]()

    def cut() -> float:
        return table.cut(uniform(generator, table.spec.rows, cut_rows))

    for number in range(1 + rounds):
        table.change_all()
        before = [cut() for _ in range(_WARM_UP)][_WARM_UP // 2 :]
        seconds, times = _while(lambda: admin.make_checkpoint(_MODEL), cut)
        after = [cut() for _ in range(_WARM_UP)][_WARM_UP // 2 :]
        if number:  # The first one touches memory and disk for the first time.
            without.append(before + after)
            meanwhile.append(times)
            taken.append(seconds)
    pairs = list(zip(meanwhile, without, strict=True))
    return {
        **spread_of("cut_ratio", [statistics.median(each) / statistics.median(other) for each, other in pairs]),
        "cut_seconds": statistics.median(each for times in without for each in times),
        "cut_meanwhile_seconds": statistics.median(each for times in meanwhile for each in times),
        "longest_cut_meanwhile_seconds": max(each for times in meanwhile for each in times),
        "cuts_meanwhile": sum(map(len, meanwhile)),
        "checkpoint_seconds": statistics.median(taken),
    }


def _while(work: Callable[[], object], cut: Callable[[], float]) -> tuple[float, list[float]]:
    """How long some work takes, and each cut that begins and ends meanwhile; the first one, if none does."""
    failures, ended = list[BaseException](), list[float]()

    def do() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)
        ended.append(time.perf_counter())

    started, times, first = time.perf_counter(), list[float](), 0.0
    thread = threading.Thread(target=do)
    thread.start()
    while thread.is_alive():
        seconds = cut()
        first = first or seconds
        if thread.is_alive():
            times.append(seconds)
    thread.join()
    if failures:
        raise failures[0]
    return ended[0] - started, times or [first]


def _written(table: SizedTable, admin: Admin) -> dict[str, Any]:
    generator, rows = np.random.default_rng(1), table.spec.rows
    admin.make_checkpoint(_MODEL)
    made, count = list[dict[str, Any]](), max(1, int(rows * _OF_A_CHECKPOINT))
    changed = 0
    while changed < _TIMES * rows:
        table.cut(uniform(generator, rows, count))
        changed += count
        made.append(admin.make_checkpoint(_MODEL))
    written = sum(each["new_bytes"] for each in made)
    return {
        "write_ratio": written / (changed * table.spec.row_bytes),
        "written_bytes": written,
        "changed_bytes": changed * table.spec.row_bytes,
        "most_stored_ratio": max(each["bytes"] for each in made) / (rows * table.spec.row_bytes),
        "checkpoints": len(made),
    }


T = TypeVar("T")


class _Subject:
    """A model of one table whose checkpoint is written in this process."""

    owner, history = "", "bench"

    def __init__(self, table: StampedTable) -> None:
        self._tables = [SourceTable(TableKey("", table.spec.name, 0), table, spec_record(table.spec))]
        self._position = Position("bench", table.counts.newest)

    def checkpoint_tables(self) -> Sequence[SourceTable]:
        return self._tables

    def checkpoint_state(self) -> dict[str, Any]:
        return {}

    def run(self, function: Callable[[], T]) -> T:
        return function()

    def position(self) -> Position:
        return self._position

    def sources(self) -> Sequence[Source]:
        return [self]

    def small_records(self) -> dict[str, bytes]:
        return {}

    def log_records(self, _before: Manifest | None) -> list[LogRecord]:
        return []

    def in_haste(self) -> bool:
        return True

    def check(self) -> None:
        pass


def _loaded(spec: TableSpec, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        store = CheckpointStore(_MODEL, Place(folder))
        manifest = _stored(store, spec)
        files = [Path(folder, file.name) for file in manifest.files]
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())  # Pages that are not on the disk cannot be dropped.
        read = dict[str, list[float]](warm=[], cold=[])
        loaded = dict[str, list[float]](warm=[], cold=[])
        for kind in ("cold", "warm"):
            for number in range(rounds):
                # Each in turn is the first, and cold files are as cold for the one as for the other.
                order = [(read, partial(_read, files)), (loaded, partial(_load, store, manifest, spec))]
                for seconds, work in order[:: 1 if number % 2 else -1]:
                    if kind == "cold":
                        _drop(files)
                    started = time.perf_counter()
                    work()
                    seconds[kind].append(time.perf_counter() - started)
    ratios = {
        kind: [one / other for one, other in zip(loaded[kind], read[kind], strict=True)]
        for kind in ("warm", "cold")
    }
    return {
        **spread_of("load_ratio", ratios["warm"]),
        **spread_of("load_cold_ratio", ratios["cold"]),
        "load_seconds": statistics.median(loaded["warm"]),
        "load_cold_seconds": statistics.median(loaded["cold"]),
        "read_seconds": statistics.median(read["warm"]),
        "read_cold_seconds": statistics.median(read["cold"]),
        "load_gb": manifest.bytes / 1e9,
    }


def _stored(store: CheckpointStore, spec: TableSpec) -> Manifest:
    """A checkpoint of a table of random rows."""
    table, generator = StampedTable(spec), np.random.default_rng(2)
    values = generator.standard_normal((min(_AT_ONCE, spec.rows), spec.dim), np.float32)
    for first in range(0, spec.rows, _AT_ONCE):
        ids = np.arange(first, min(first + _AT_ONCE, spec.rows))
        table.apply(RowBatch.of_table(spec, ids, values[: len(ids)]), 1 + first // _AT_ONCE)
    return store.write(_Subject(table), None)


def _read(files: Sequence[Path]) -> None:
    _ = [np.fromfile(file, np.uint8) for file in files]


def _load(store: CheckpointStore, manifest: Manifest, spec: TableSpec) -> None:
    store.load(manifest, [StampedTable(spec)])


def _drop(files: Sequence[Path]) -> None:
    """Have the system forget what it has of files in memory."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"checkpoint: a table of {figures['rows']:,} rows x {figures['dim']} fp32, cuts of {figures['cut_rows']:,}"
    )
    cut, meanwhile, longest = (
        1e3 * figures[f"{name}_seconds"] for name in ("cut", "cut_meanwhile", "longest_cut_meanwhile")
    )
    console.print(
        f"  cut {cut:.1f} ms, while one is written {meanwhile:.1f} ms, at most {longest:.0f} ms; it takes "
        f"{figures['checkpoint_seconds']:.2f} s   cut_ratio {figures['cut_ratio']:.2f}  (aim 1.2)"
    )
    console.print(
        f"  {figures['written_bytes'] / 1e9:.2f} GB written in {figures['checkpoints']} checkpoints, "
        f"{figures['changed_bytes'] / 1e9:.2f} GB changed   write_ratio {figures['write_ratio']:.2f}  (aim 2.2)"
    )
    for name, says in (("load", "in memory"), ("load_cold", "on disk")):
        read = figures["read_seconds" if name == "load" else "read_cold_seconds"]
        console.print(
            f"  {figures['load_gb']:.2f} GB, files {says}: loaded in {figures[f'{name}_seconds']:.2f} s, read in "
            f"{read:.2f} s   {name}_ratio {figures[f'{name}_ratio']:.2f}" + ("  (aim 2)" * (name == "load"))
        )
