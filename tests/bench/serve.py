"""Lookups of a quantised predictor while its rows are replaced, against the same without updates.

One table, quantised by TorchRec to 8 bits, is looked up in bags by one thread, each forward inside `reading()`,
while another thread applies releases of rows that lie encoded in this process's memory: no service, no network.
The process has one core for both, so that what an update costs is taken from lookups. In each round every way of
reading has two turns, without and with updates.

    lookup_ratio   lookups per second with updates, over those without
    p99_ratio      99th percentile of the time of a forward, likewise
"""

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from tests.bench.timing import spread_of
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings

from deltasync.base.process import keep_freed_memory
from deltasync.client import Position, Release, RowBatch, TableSpec, ValueType
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.table_form import Mode, TableForm

WAYS: tuple[Reads, ...] = ("pause", "copies")
_BAGS, _BAG = 256, 20
_BATCHES, _RELEASES = 64, 16
_WARM_UP = 1

Turn = Mapping[str, float]


OPTIONS = (
    click.option("--rows", type=click.IntRange(100), default=1_000_000, help="Rows of the table."),
    click.option("--dim", type=click.IntRange(4), default=64, help="Values of a row."),
    click.option(
        "--share",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.1,
        help="Share of the rows replaced a second.",
    ),
    click.option("--releases-per-second", type=click.IntRange(1), default=10, help="Releases a second."),
    click.option("--seconds", type=click.FloatRange(0, min_open=True), default=2.0, help="Seconds of a turn."),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=7,
        help="Rounds, in each of which every way of reading has its turns.",
    ),
)


@dataclass(frozen=True)
class ServeOptions:
    """Sizes; see `OPTIONS`."""

    rows: int
    dim: int
    share: float
    releases_per_second: int
    seconds: float
    rounds: int


def run(console: Console, **settings: Any) -> dict[str, Any]:
    options = ServeOptions(**settings)
    keep_freed_memory()
    with _one_core():
        figures = _measure(options)
    _print(console, figures)
    return figures


@contextmanager
def _one_core() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


class Predictor:
    """A quantised module that is looked up, the target that writes it, and releases for it."""

    def __init__(self, options: ServeOptions, reads: Reads) -> None:
        self._options = options
        self._table = TableSpec("0.embedding_bags.table", options.rows, options.dim)
        self.target = TorchTarget(_quantised(options), reads=reads)
        self._generator = np.random.default_rng(0)
        self._numbers = itertools.count(1)
        self._batches = [self._batch() for _ in range(_BATCHES)]
        self.apply(self._rows(options.rows))
        each = max(1, int(options.rows * options.share / options.releases_per_second))
        self._releases = [self._rows(each) for _ in range(_RELEASES)]

    def apply(self, rows: RowBatch) -> None:
        number = next(self._numbers)
        release = Release(Position("bench", number), number, 0, number == 1, [rows.table], [rows], version=number)
        self.target.apply(release)

    def turn(self, *, updated: bool) -> Turn:
        """Look up for some seconds: lookups and replaced rows of a second, and how long forwards took."""
        stop, applied = threading.Event(), [0]
        updates = threading.Thread(target=self._update, args=(stop, applied))
        if updated:
            updates.start()
        took = self._look_up()
        stop.set()
        if updated:
            updates.join()
        ordered = sorted(took)
        return {
            "lookups": len(took) * _BAGS * _BAG / self._options.seconds,
            "replaced": applied[0] / self._options.seconds,
            "p99": ordered[int(0.99 * len(ordered))],
        }

    def _look_up(self) -> list[float]:
        took, ends = [], time.perf_counter() + self._options.seconds
        batches = itertools.cycle(self._batches)
        with torch.inference_mode():
            while (started := time.perf_counter()) < ends:
                with self.target.reading() as reading:
                    reading.module(next(batches))
                took.append(time.perf_counter() - started)
        return took

    def _update(self, stop: threading.Event, applied: list[int]) -> None:
        """Apply releases, so many a second; those that are late follow at once."""
        begun = time.perf_counter()
        for number, rows in enumerate(itertools.cycle(self._releases)):
            due = begun + number / self._options.releases_per_second
            if stop.wait(max(0.0, due - time.perf_counter())):
                return
            self.apply(rows)
            applied[0] += len(rows)

    def _rows(self, count: int) -> RowBatch:
        ids = np.sort(self._generator.choice(self._options.rows, count, replace=False))
        values = self._generator.standard_normal((count, self._options.dim), np.float32)
        form = TableForm(self._table, ValueType.INT8_TBE, Mode.EMBEDDINGS)
        return RowBatch.of_table(form.replica_spec, ids, form.encode(values))

    def _batch(self) -> KeyedJaggedTensor:
        ids = torch.from_numpy(self._generator.integers(0, self._options.rows, _BAGS * _BAG))
        return KeyedJaggedTensor.from_lengths_sync(["id"], ids, torch.full((_BAGS,), _BAG))


def _quantised(options: ServeOptions) -> nn.Module:
    config = EmbeddingBagConfig(
        name="table", embedding_dim=options.dim, num_embeddings=options.rows, feature_names=["id"]
    )
    module = nn.Sequential(EmbeddingBagCollection(tables=[config]))
    quantised: nn.Module = quantize_embeddings(module, dtype=torch.qint8, inplace=True)
    return quantised.eval()


def _measure(options: ServeOptions) -> dict[str, Any]:
    default = TorchTarget(nn.Linear(1, 1)).reads
    predictors: dict[str, Predictor] = {way: Predictor(options, way) for way in WAYS}
    rounds = [_round(predictors) for _ in range(_WARM_UP + options.rounds)][_WARM_UP:]
    figures: dict[str, Any] = {"default": default, **vars(options)}
    for name in predictors:
        figures |= _ratios(f"{name}_", [one[name] for one in rounds])
    return {
        **figures,
        **_ratios("", [one[default] for one in rounds]),
    }


def _round(predictors: Mapping[str, Predictor]) -> dict[str, tuple[Turn, Turn]]:
    return {name: (each.turn(updated=False), each.turn(updated=True)) for name, each in predictors.items()}


def _ratios(prefix: str, turns: Sequence[tuple[Turn, Turn]]) -> dict[str, float]:
    return {
        **spread_of(f"{prefix}lookup_ratio", [after["lookups"] / before["lookups"] for before, after in turns]),
        **spread_of(f"{prefix}p99_ratio", [after["p99"] / before["p99"] for before, after in turns]),
        f"{prefix}lookups_per_second": statistics.median(before["lookups"] for before, _ in turns),
        f"{prefix}replaced_rows_per_second": statistics.median(after["replaced"] for _, after in turns),
        f"{prefix}p99_seconds": statistics.median(before["p99"] for before, _ in turns),
    }


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    console.print(
        f"serve: {figures['rows']:,} rows x {figures['dim']} int8, {100 * figures['share']:g} % of them replaced "
        f"a second in {figures['releases_per_second']} releases, on one core; median of {figures['rounds']} rounds"
    )
    console.print("  reading   lookups/s   with updates, over without     p99 of a forward   over without")
    for name in WAYS:
        console.print(
            f"  {name:<8} {figures[f'{name}_lookups_per_second'] / 1e6:>7.1f} M   "
            f"{_range(figures, f'{name}_lookup_ratio'):<25} {1e3 * figures[f'{name}_p99_seconds']:>13.2f} ms   "
            f"{_range(figures, f'{name}_p99_ratio')}"
        )
    console.print(f"  the default is {figures['default']} (aims: lookups at least 0.9, p99 at most 1.5)")


def _range(figures: Mapping[str, Any], name: str) -> str:
    return f"{figures[name]:.2f} ({figures[f'{name}_low']:.2f} to {figures[f'{name}_high']:.2f})"
