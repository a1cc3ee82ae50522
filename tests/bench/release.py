"""Time of one release, against the bare NumPy gathers and norms without which there is no ranking.

A release of the largest tenth of 1 M dirty rows: the view looks at every dirty row, ranks, encodes what it takes,
keeps that with its digests, and writes down in the log which rows these are. It is done as the service does it,
on the model's thread, but in this process. The bare figure is one line on the same arrays, in turns:

    np.linalg.norm(table[ids] - view[ids], axis=1)

Before each round every dirty row gets new values, so that the view has to look at all of them again. A fifth of
the table never changes: rows with gaps between them must be gathered. The bare line reads the view in fp32;
releases in other types are compared with the same figure.

The line makes four arrays of the size of all dirty rows. It is called a few times in a round and the quickest call
counts, since the others include the time to find memory.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.timing import spread_of
from tests.support.local_model import commit

from deltasync.base.process import keep_freed_memory
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore
from deltasync.model.feed import ReleaseStatistics
from deltasync.model.model import Model
from deltasync.views.view import View

TOP_K = 0.1
POLICIES = {kind.value: Policy(top_k=TOP_K, value_type=kind) for kind in ValueType}
# What the ratio of each of these types is called, and what it is to be at most.
FIGURES = {"release": "fp32", "int8": "int8"}
AIMS = {"fp32": 0.4, "int8": 0.4}
# The first rounds touch every page of tables and log for the first time.
WARM_UP = 2
_BARE, _BARE_CALLS = "bare", 3
Floats = NDArray[Any]
Round = Mapping[str, float]


OPTIONS = (
    click.option("--rows", type=click.IntRange(1), default=1_000_000, help="Dirty rows."),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        default=7,
        help="Rounds, in each of which every value type and NumPy have a turn.",
    ),
)


def run(console: Console, rows: int, dim: int, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        figures = asyncio.run(_measure(Path(folder), rows, dim, rounds))
    _print(console, figures)
    return figures


class ChangingTable:
    """The rows of a model's one table, which all change at every cut."""

    def __init__(self, model: Model, rows: int, dim: int) -> None:
        generator = np.random.default_rng(0)
        self.table = TableSpec("bench", rows + rows // 4 + 1, dim)
        self.ids = np.sort(generator.choice(self.table.rows, rows, replace=False))
        self.model = model
        self._values = generator.standard_normal((rows, dim), np.float32)
        # Some rows always change more than others.
        self._change = generator.standard_normal((rows, dim), np.float32) * generator.random((rows, 1), np.float32)
        self._version = 0

    async def change(self) -> None:
        """Give every one of them new values, in a cut of their own."""
        self._values += self._change
        self._version += 1
        seal = _sealed(self._version, len(self.ids), self.table)
        await commit(self.model, seal, [RowBatch.of_table(self.table, self.ids, self._values)])


async def _measure(folder: Path, rows: int, dim: int, rounds: int) -> dict[str, Any]:
    async with _model(folder) as (model, _):
        changing = ChangingTable(model, rows, dim)
        await model.tables.add([changing.table])
        await changing.change()
        views = {name: View(name, model) for name in POLICIES}
        for name, view in views.items():
            await view.prepare(POLICIES[name])
        seconds = [await _round(changing, views) for _ in range(WARM_UP + rounds)]
        releases = {name: view.state.statistics for name, view in views.items() if view.state.statistics}
    sizes = {"rows": rows, "table_rows": changing.table.rows, "dim": dim, "rounds": rounds}
    return _figures(seconds[WARM_UP:], releases) | sizes


def _figures(rounds: Sequence[Round], releases: Mapping[str, ReleaseStatistics]) -> dict[str, Any]:
    kinds = {
        name: {
            **spread_of("time_ratio", [one[name] / one[_BARE] for one in rounds]),
            "seconds": statistics.median(one[name] for one in rounds),
            "released_rows": release.taken.rows,
            "released_bytes": release.taken.bytes,
            "dirty_rows": release.taken.rows + release.backlog.rows,
        }
        for name, release in releases.items()
    }
    ratios = {
        f"{name}_{key}": value
        for name, kind in FIGURES.items()
        for key, value in kinds[kind].items()
        if "time_ratio" in key
    }
    return {**ratios, "bare_seconds": statistics.median(one[_BARE] for one in rounds), "value_types": kinds}


@asynccontextmanager
async def _model(folder: Path) -> AsyncIterator[tuple[Model, LogStore]]:
    log = LmdbStore(LogOptions(directory=folder / "log"))
    model = Model("bench", log, CheckpointStore("bench", Place(str(folder / "checkpoints"))))
    try:
        yield model, log
    finally:
        await model.stop()
        log.close()


async def _round(changing: ChangingTable, views: Mapping[str, View]) -> Round:
    await changing.change()
    table, view = (np.asarray(each.rows) for each in (changing.model.tables[0], views["fp32"].tables[0]))
    seconds = {_BARE: _bare(table, view, changing.ids)}
    for name, one in views.items():
        started = time.perf_counter()
        await one.make_release(POLICIES[name], 0)
        seconds[name] = time.perf_counter() - started
    return seconds


def _bare(table: Floats, view: Floats, ids: Ids) -> float:
    """Seconds of the quickest of a few calls."""
    seconds = []
    for _ in range(_BARE_CALLS):
        started = time.perf_counter()
        np.linalg.norm(table[ids] - view[ids], axis=1)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _sealed(version: int, rows: int, table: TableSpec) -> Seal:
    now = time.time_ns()
    return Seal(
        version=version,
        step=version,
        run="bench",
        run_started_unix_ns=now,
        world_size=1,
        rows=rows,
        bytes=rows * table.row_bytes,
        log_bytes=0,
        step_end_unix_ns=now,
        sealed_unix_ns=now,
    )


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"release: {figures['rows']:,} dirty rows of {figures['table_rows']:,} x {figures['dim']} fp32, top_k "
        f"{100 * TOP_K:g} %, median of {figures['rounds']} rounds"
    )
    console.print(f"  bare NumPy gathers and norms {1e3 * figures['bare_seconds']:>5.0f} ms")
    for name, line in figures["value_types"].items():
        ratio = f"{line['time_ratio']:.2f} ({line['time_ratio_low']:.2f} to {line['time_ratio_high']:.2f})"
        aim = f"   (aim: at most {AIMS[name]})" if name in AIMS else ""
        console.print(f"  {name:<8}   {1e3 * line['seconds']:>5.0f} ms   ratio {ratio}{aim}")
