"""Time to apply changed rows, over a bare NumPy scatter of them.

    rows[ids] = values
    stamps[ids] = number

Applied are 300,000 of 1,000,000 rows: as the service does it, with stamps and digests (`apply_time_ratio`), and as
a replica does, which scatters the rows and proves what it holds (`replica_time_ratio`). All are done in the same
process, in turns, with the same rows.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import click
import numpy as np
from rich.console import Console
from tests.bench.timing import spread_of

from deltasync.base.process import keep_freed_memory
from deltasync.client import NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.core.rows import BLOCK_ROWS
from deltasync.core.stamped_table import StampedTable
from deltasync.kernels.compiled import warm

_BARE, _SERVICE, _REPLICA = "bare", "service", "replica"
_WARM_UP, _BATCHES = 2, 3

Apply = Callable[[RowBatch], object]


OPTIONS = (
    click.option("--rows", type=click.IntRange(1), default=1_000_000, help="Rows of the table."),
    click.option("--changed", type=click.IntRange(1), default=300_000, help="Rows that change."),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=15,
        help="Rounds, in each of which every way of applying has a turn.",
    ),
)


def run(console: Console, rows: int, changed: int, dim: int, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    warm()
    table, changed = TableSpec("bench", rows, dim), min(rows, changed)
    ways: dict[str, Apply] = {
        _BARE: _bare(table),
        _SERVICE: _service(table),
        _REPLICA: _replica(table),
    }
    batches = _batches(table, changed)
    seconds = [_round(ways, batches[number % len(batches)]) for number in range(_WARM_UP + rounds)][_WARM_UP:]
    figures = {
        **spread_of("apply_time_ratio", [one[_SERVICE] / one[_BARE] for one in seconds]),
        **spread_of("replica_time_ratio", [one[_REPLICA] / one[_BARE] for one in seconds]),
        **{f"{name}_seconds": statistics.median(one[name] for one in seconds) for name in ways},
        "rows": rows,
        "changed": changed,
        "dim": dim,
        "rounds": rounds,
    }
    _print(console, figures)
    return figures


def _batches(table: TableSpec, changed: int) -> list[RowBatch]:
    generator = np.random.default_rng(0)
    ids = [np.sort(generator.choice(table.rows, changed, replace=False)) for _ in range(_BATCHES)]
    shape = changed, table.dim
    return [RowBatch.of_table(table, each, generator.standard_normal(shape, np.float32)) for each in ids]


def _bare(table: TableSpec) -> Apply:
    rows, stamps, numbers = (
        np.zeros((table.rows, table.dim), table.dtype),
        np.zeros(table.rows, np.int64),
        count(1),
    )

    def apply(batch: RowBatch) -> None:
        rows[batch.ids] = batch.values
        stamps[batch.ids] = next(numbers)

    return apply


def _service(table: TableSpec) -> Apply:
    stamped, numbers = StampedTable(table), count(1)
    return lambda batch: stamped.apply(batch, next(numbers))


def _replica(table: TableSpec) -> Apply:
    target, releases = NumpyTarget(), _releases(table)
    checksums = TargetChecksums(target)

    def apply(batch: RowBatch) -> None:
        release = next(releases)
        release.rows.extend(batch.blocks(BLOCK_ROWS))  # About as large as the chunks in which they come.
        checksums.after(release, target.apply(release))

    return apply


def _releases(table: TableSpec) -> Iterator[Release]:
    """Releases that are to get their rows; the first one resets the table."""
    return (Release(Position("bench", number), number, 0, number == 1, [table]) for number in count(1))


def _round(ways: Mapping[str, Apply], batch: RowBatch) -> dict[str, float]:
    return {name: _seconds(way, batch) for name, way in ways.items()}


def _seconds(apply: Apply, batch: RowBatch) -> float:
    started = time.perf_counter()
    apply(batch)
    return time.perf_counter() - started


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    console.print(
        f"apply: {figures['changed']:,} of {figures['rows']:,} rows x {figures['dim']} fp32, median of "
        f"{figures['rounds']} rounds"
    )
    console.print(f"  bare NumPy scatter of rows and stamps  {1e3 * figures['bare_seconds']:>6.1f} ms")
    for name, says, figure, aim in (
        (_SERVICE, "service: rows, stamps, digests", "apply_time_ratio", "   (aim: at most 0.8)"),
        (_REPLICA, "replica: rows, written and proven", "replica_time_ratio", "   (aim: at most 1.3)"),
    ):
        low, high = figures[f"{figure}_low"], figures[f"{figure}_high"]
        ratio = f"{figures[figure]:.2f} ({low:.2f} to {high:.2f})"
        console.print(f"  {says:<37}  {1e3 * figures[f'{name}_seconds']:>6.1f} ms   {ratio}{aim}")
