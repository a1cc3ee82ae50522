"""Lookups of worker processes in one mirror while its rows change, against private copies that do not change.

Four processes look rows up as fast as they can, first each in its own copy, then in the mirror without changes,
and then in the mirror while this process applies releases to it. There is no service and no network. A copy is a
`NumpyTarget`, and its rows are read by the same kernel as those of the mirror.

    lookup_ratio   lookups per second in the mirror with changes, over those in private copies without
    p99_ratio      99th percentile of the time of a lookup in the mirror, with changes over without
    memory_ratio   memory of the mirror and four workers, over that of the mirror and one worker
    copies_ratio   that memory of four workers, over one copy of the table: the mirror has two sides
    private_ratio  memory of four private copies, over one copy of the table
    apply_ratio    time of `apply`, which writes the rows of both sides with their digests, over one line of NumPy
                   that writes them once into an array in the same folder: table[ids] = rows

Memory is what processes have more than before they attached. A page of shared memory counts once in the sum.
"""

import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.console import Console
from tests.bench.children import Children, Peer
from tests.bench.process import own_bytes
from tests.bench.shared_worker import IDS, NAME
from tests.bench.timing import spread_of

from deltasync.base.process import keep_freed_memory
from deltasync.client import Position, Release, RowBatch, TableSpec
from deltasync.client.shared.target import SharedTarget
from deltasync.kernels.compiled import warm

_RELEASES, _WARM_UP = 8, 1
T = TypeVar("T")

Turn = Mapping[str, float]

OPTIONS = (
    click.option("--rows", type=click.IntRange(100), default=1_000_000, help="Rows of the table."),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option("--workers", type=click.IntRange(2), default=4, help="Worker processes."),
    click.option(
        "--share",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.1,
        help="Share of the rows that changes a second.",
    ),
    click.option("--releases-per-second", type=click.IntRange(1), default=10, help="Releases a second."),
    click.option("--seconds", type=click.FloatRange(0, min_open=True), default=2.0, help="Seconds of a turn."),
    click.option("--rounds", type=click.IntRange(1), default=9, help="Rounds of three turns."),
    click.option(
        "--directory",
        type=click.Path(exists=True, file_okay=False),
        default="/dev/shm",  # noqa: S108  # the shared memory of the host
        help="Folder of the mirror.",
    ),
    click.option("--huge-pages", is_flag=True, help="Ask for huge pages."),
)


@dataclass(frozen=True)
class SharedOptions:
    """Sizes; see `OPTIONS`."""

    rows: int
    dim: int
    workers: int
    share: float
    releases_per_second: int
    seconds: float
    rounds: int
    directory: str
    huge_pages: bool


def run(console: Console, **settings: Any) -> dict[str, Any]:
    options = SharedOptions(**settings)
    keep_freed_memory()
    warm()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        figures = vars(options) | _measure(options, Path(folder))
    _print(console, figures)
    return figures


class Mirror:
    """The target, and releases for it."""

    def __init__(self, options: SharedOptions, folder: Path) -> None:
        self._options, self._table = options, TableSpec("table", options.rows, options.dim)
        self._folder = folder
        self.target = SharedTarget(NAME, NAME, directory=folder, huge_pages=options.huge_pages)
        self._generator, self._numbers = np.random.default_rng(0), itertools.count(1)
        self.apply(self._rows(options.rows))
        each = max(1, int(options.rows * options.share / options.releases_per_second))
        self._releases = [self._rows(each) for _ in range(_RELEASES)]

    def _rows(self, count: int) -> RowBatch:
        ids = np.sort(self._generator.choice(self._options.rows, count, replace=False))
        values = self._generator.standard_normal((count, self._options.dim), np.float32)
        return RowBatch.of_table(self._table, ids, values)

    def apply(self, rows: RowBatch) -> None:
        number = next(self._numbers)
        self.target.apply(
            Release(Position(NAME, number), number, 0, number == 1, [self._table], [rows], version=number)
        )

    def update(self, stop: threading.Event, applied: list[int]) -> None:
        """Apply releases at their rate; those that are late follow at once."""
        begun = time.perf_counter()
        for number, rows in enumerate(itertools.cycle(self._releases)):
            due = begun + number / self._options.releases_per_second
            if stop.wait(max(0.0, due - time.perf_counter())):
                return
            self.apply(rows)
            applied[0] += len(rows)

    def apply_seconds(self, rounds: int) -> list[tuple[float, float]]:
        """How long NumPy took for some rows in shared memory, and `apply`, in turns."""
        bare = np.asarray(
            np.memmap(self._folder / "bare", np.float32, "w+", shape=(self._options.rows, self._options.dim))
        )
        bare[:] = 1
        seconds = list[tuple[float, float]]()
        for number in range(_WARM_UP + rounds):
            rows = self._rows(max(1, int(self._options.rows * self._options.share)))
            took = [0.0, 0.0]
            for way in (number % 2, 1 - number % 2):  # Each way comes first in half of the rounds.
                started = time.perf_counter()
                if way:
                    self.apply(rows)
                else:
                    bare[rows.ids] = rows.values
                took[way] = time.perf_counter() - started
            seconds.append((took[0], took[1]))
        return seconds[_WARM_UP:]


def _measure(options: SharedOptions, folder: Path) -> dict[str, Any]:
    with Children() as children:
        arguments = str(folder), "table", str(options.rows), str(options.dim)
        workers = [children.peer(*arguments, module="tests.bench.shared_worker") for _ in range(options.workers)]
        mirror = Mirror(options, folder)
        try:
            memory = _memory(workers, options)
            rounds = [_round(mirror, workers, options) for _ in range(_WARM_UP + options.rounds)][_WARM_UP:]
            applied = mirror.apply_seconds(3 * options.rounds)
        finally:
            mirror.target.close()
    return {
        **memory,
        **spread_of("lookup_ratio", [after["lookups"] / copy["lookups"] for copy, _, after in rounds]),
        **spread_of("p99_ratio", [after["p99"] / before["p99"] for _, before, after in rounds]),
        **spread_of("apply_ratio", [ours / bare for bare, ours in applied]),
        "lookups_per_second": statistics.median(after["lookups"] for _, _, after in rounds),
        "copy_lookups_per_second": statistics.median(copy["lookups"] for copy, _, _ in rounds),
        "changed_rows_per_second": statistics.median(after["changed"] for _, _, after in rounds),
        "p99_seconds": statistics.median(before["p99"] for _, before, _ in rounds),
        "apply_seconds": statistics.median(ours for _, ours in applied),
    }


def _memory(workers: Sequence[Peer], options: SharedOptions) -> dict[str, float]:
    """Attach one worker and then the others to the mirror, and then make private copies."""
    before = [int(each.ask("memory")) for each in workers]

    def grown() -> int:
        return sum(int(each.ask("memory")) for each in workers) - sum(before)

    def with_mirror() -> int:
        return own_bytes(os.getpid(), private=False) + grown()

    workers[0].ask("attach")
    one = with_mirror()
    for each in workers[1:]:
        each.ask("attach")
    all_of_them, attached = with_mirror(), grown()
    for each in workers:
        each.ask("copy")
    table = options.rows * options.dim * 4
    return {
        "memory_ratio": all_of_them / one,
        "copies_ratio": all_of_them / table,
        "private_ratio": (grown() - attached) / table,
    }


def _round(mirror: Mirror, workers: Sequence[Peer], options: SharedOptions) -> tuple[Turn, Turn, Turn]:
    stop, applied = threading.Event(), [0]
    copy, before = (_look(workers, where, options) for where in ("copy", "mirror"))
    updates = threading.Thread(target=mirror.update, args=(stop, applied))
    updates.start()
    try:
        after = _look(workers, "mirror", options)
    finally:
        stop.set()
        updates.join()
    return copy, before, {**after, "changed": applied[0] / options.seconds}


def _look(workers: Sequence[Peer], where: str, options: SharedOptions) -> dict[str, float]:
    for each in workers:
        each.begin(f"look {where} {options.seconds}")
    took = sorted(itertools.chain.from_iterable(json.loads(each.read()) for each in workers))
    return {"lookups": len(took) * IDS / options.seconds, "p99": took[int(0.99 * len(took))]}


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    console.print(
        f"shared: {figures['rows']:,} rows x {figures['dim']} fp32 for {figures['workers']} workers, "
        f"{100 * figures['share']:g} % of them change a second in {figures['releases_per_second']} releases; "
        f"median of {figures['rounds']} rounds"
    )
    for says, figure, aim in (
        ("lookups, over those in private copies", "lookup_ratio", "at least 0.9"),
        ("p99 of a lookup with changes, over without", "p99_ratio", "at most 1.5"),
        ("apply, over a NumPy scatter into one copy", "apply_ratio", "at most 1.5"),
    ):
        low, high = figures[f"{figure}_low"], figures[f"{figure}_high"]
        console.print(f"  {says:<43} {figures[figure]:.2f} ({low:.2f} to {high:.2f})   (aim: {aim})")
    console.print(
        f"  {'memory with all workers, over one':<43} {figures['memory_ratio']:.2f}   (aim: at most 1.2): "
        f"{figures['copies_ratio']:.2f} copies with both sides, instead of {figures['private_ratio']:.2f}"
    )
    console.print(
        f"  {figures['lookups_per_second'] / 1e6:.1f} M rows/s looked up in the mirror, "
        f"{figures['copy_lookups_per_second'] / 1e6:.1f} M in private copies, p99 "
        f"{1e3 * figures['p99_seconds']:.2f} ms; {figures['changed_rows_per_second'] / 1e3:.0f} k rows/s changed, "
        f"apply {1e3 * figures['apply_seconds']:.1f} ms"
    )
