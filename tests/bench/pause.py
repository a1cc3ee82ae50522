"""Pause of readers while releases are applied, over a bare NumPy scatter of the same rows.

A thread reads a few rows within `target.reading()`, again and again, while another one applies releases of 100,000
rows and proves what it holds, as a subscriber does. The pause of a release is the longest time that the reader
waited to get in meanwhile. What is told is the 99th percentile of the pauses, over the median time of

    rows[ids] = values
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import click
import numpy as np
from rich.console import Console

from deltasync.client import NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.checksums import TargetChecksums
from deltasync.client.reading import Reads
from deltasync.core.process import keep_freed_memory
from deltasync.core.rows import BLOCK_ROWS
from deltasync.kernels.compiled import warm
from tests.bench.timing import spread_of

WAYS: tuple[Reads, ...] = ("pause", "copies")
_WARM_UP, _BATCHES, _LOOKUP = 1, 8, 256

F = TypeVar("F", bound=Callable[..., Any])
# From when to when, by the clock.
Span = tuple[float, float]


def pause_options(command: F) -> F:
    """Add the options of the sizes to a click command."""
    for name, default, meaning in (
        ("--rounds", 5, "Rounds, in each of which every way of reading has a turn."),
        ("--releases", 100, "Releases of a turn."),
        ("--dim", 64, "Values of a row."),
        ("--changed", 100_000, "Rows of a release."),
        ("--rows", 1_000_000, "Rows of the table."),
    ):
        command = click.option(name, type=click.IntRange(1), default=default, help=meaning)(command)
    return command


def run(console: Console, rows: int, changed: int, dim: int, releases: int, rounds: int) -> dict[str, Any]:
    """Measure, print and return the figures."""
    keep_freed_memory()
    warm()
    table = TableSpec("bench", rows, dim)
    batches = _batches(table, min(rows, changed))
    bare = np.zeros((rows, dim), np.float32)
    replicas: dict[str, Replica] = {way: Replica(table, way) for way in WAYS}
    turns = [_turn(replicas, bare, batches, releases) for _ in range(_WARM_UP + rounds)][_WARM_UP:]
    figures: dict[str, Any] = {"rows": rows, "changed": len(batches[0]), "dim": dim, "releases": releases}
    for name in replicas:
        figures |= spread_of(f"{name}_pause_ratio", [turn[name] / turn["bare"] for turn in turns])
        figures[f"{name}_pause_seconds"] = statistics.median(turn[name] for turn in turns)
    figures |= {"pause_ratio": max(figures[f"{name}_pause_ratio"] for name in replicas), "rounds": rounds}
    figures["bare_seconds"] = statistics.median(turn["bare"] for turn in turns)
    _print(console, figures)
    return figures


class Replica:
    """A target with its checksums, to which releases are applied."""

    def __init__(self, table: TableSpec, reads: Reads) -> None:
        self._table = table
        self._target = NumpyTarget(reads=reads)
        self._checksums = TargetChecksums(self._target)
        self._numbers = count(1)

    def pause(self, batches: Sequence[RowBatch], releases: int) -> float:
        """The 99th percentile of the pauses of so many releases, in seconds."""
        with self._reader() as waits:
            applied = [self._apply(batches[number % len(batches)]) for number in range(releases)]
        return float(np.percentile(_longest(waits, applied), 99))

    def _apply(self, batch: RowBatch) -> Span:
        number = next(self._numbers)
        rows = [*batch.blocks(BLOCK_ROWS)]  # About as large as the chunks in which they come.
        release = Release(Position("bench", number), number, 0, number == 1, [self._table], rows)
        started = time.perf_counter()
        self._target.apply(release)
        self._checksums.after(release)
        return started, time.perf_counter()

    @contextmanager
    def _reader(self) -> Iterator[list[Span]]:
        """A thread that reads meanwhile; when it came and when it was let in."""
        inside, stop, waits = threading.Event(), threading.Event(), list[Span]()
        reader = threading.Thread(target=self._read, args=(inside, stop, waits))
        reader.start()
        inside.wait()
        try:
            yield waits
        finally:
            stop.set()
            reader.join()

    def _read(self, inside: threading.Event, stop: threading.Event, waits: list[Span]) -> None:
        ids = np.random.default_rng(0).integers(0, self._table.rows, _LOOKUP)
        while not stop.is_set():
            came = time.perf_counter()
            with self._target.reading() as reading:
                waits.append((came, time.perf_counter()))
                inside.set()
                for rows in reading.tables.values():
                    rows.take(ids, axis=0)


def _longest(waits: Sequence[Span], applied: Sequence[Span]) -> list[float]:
    """The longest wait of those that were while each release was applied, in seconds."""
    came, entered = np.array(waits).T
    # One reader waits after the other: in both arrays times ascend.
    first, end = (
        np.searchsorted(*each) for each in ((entered, [a for a, _ in applied]), (came, [b for _, b in applied]))
    )
    return [float((entered - came)[a:b].max(initial=0)) for a, b in zip(first, end, strict=True)]


def _batches(table: TableSpec, changed: int) -> list[RowBatch]:
    generator = np.random.default_rng(0)
    ids = [np.sort(generator.choice(table.rows, changed, replace=False)) for _ in range(_BATCHES)]
    shape = changed, table.dim
    return [RowBatch.of_table(table, each, generator.standard_normal(shape, np.float32)) for each in ids]


def _turn(
    replicas: Mapping[str, Replica], bare: np.ndarray[Any, Any], batches: Sequence[RowBatch], releases: int
) -> dict[str, float]:
    pauses = {name: each.pause(batches, releases) for name, each in replicas.items()}
    return pauses | {"bare": statistics.median(_scatter(bare, batch) for batch in batches)}


def _scatter(rows: np.ndarray[Any, Any], batch: RowBatch) -> float:
    started = time.perf_counter()
    rows[batch.ids] = batch.values
    return time.perf_counter() - started


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    console.print(
        f"pause: {figures['changed']:,} of {figures['rows']:,} rows x {figures['dim']} fp32, p99 of "
        f"{figures['releases']} releases, median of {figures['rounds']} rounds"
    )
    console.print(f"  bare NumPy scatter  {1e3 * figures['bare_seconds']:>6.2f} ms")
    for name in WAYS:
        ratio = f"{figures[f'{name}_pause_ratio']:.2f} ({figures[f'{name}_pause_ratio_low']:.2f} to "
        ratio += f"{figures[f'{name}_pause_ratio_high']:.2f})"
        console.print(
            f"  {name:<18}  {1e3 * figures[f'{name}_pause_seconds']:>6.2f} ms   {ratio}   (aim: at most 1.5)"
        )
