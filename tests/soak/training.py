"""What a plain trainer does to its tables: a function of model, run and step, so that it can be done again."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tests.soak.lineage import TrainingRun, stretches

from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import TableSpec

FIRST_TABLES = {"users": 2000, "items": 1200, "tags": 600}
_DIMS = {"users": 16, "tags": 4}
_DIM = 8
_HALF = {"tags"}
_SHARE = 0.03  # Of a table's rows change in a step.
_DELETE_EVERY, _DELETED_ROWS = 7, 5
# Every step writes its number into these rows of each table, whatever rank holds them.
BEACONS = 6

Deletes = Mapping[str, Ids]


def spec_of(name: str, rows: int) -> TableSpec:
    return TableSpec(name, rows, _DIMS.get(name, _DIM), np.dtype("<f2" if name in _HALF else "<f4"))


def beacons(name: str) -> Ids:
    """The rows of a table in which every version says of which step it is."""
    return np.arange(BEACONS) * (FIRST_TABLES.get(name, BEACONS) // BEACONS)


@dataclass(frozen=True)
class Update:
    """What a step does to a table: rows [n] with values [n, dim], and rows that it deletes [m]."""

    ids: Ids
    values: Values
    deleted: Ids


def update_of(model: str, run: TrainingRun, step: int, name: str, known_rows: int) -> Update:
    """What a step of a run does to a table of which `known_rows` were there before the run."""
    spec, own = spec_of(name, run.tables[name]), zlib.crc32(f"{model}/{name}".encode())
    rng = np.random.default_rng([own, run.number, step])
    marks = beacons(name)
    new = np.arange(known_rows, spec.rows) if step == run.first_step else np.empty(0, np.int64)
    changed = rng.integers(0, spec.rows, max(1, int(spec.rows * _SHARE)))
    deleted = np.empty(0, np.int64)
    if step % _DELETE_EVERY == 0:
        deleted = np.setdiff1d(rng.integers(0, spec.rows, _DELETED_ROWS), marks)
    ids = np.union1d(np.union1d(changed, new), marks)
    values = rng.standard_normal((len(ids), spec.dim), np.float32).astype(spec.dtype)
    values[np.searchsorted(ids, marks)] = step % 2048  # A whole number in fp16, too.
    left = ~np.isin(ids, deleted)
    return Update(ids[left], values[left], deleted)


class TrainedTables:
    """The tables of a plain trainer.

    Attributes:
        rows: [rows, dim] by name; zeros where a row is deleted.
        there: bool [rows] by name: which rows are not deleted.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Values] = {}
        self.there: dict[str, Mask] = {}

    def known_rows(self, name: str) -> int:
        return len(self.rows[name]) if name in self.rows else 0

    def apply(self, name: str, update: Update, rows: int) -> None:
        """Do to a table, of so many rows, what a step does."""
        if (known := self.known_rows(name)) < rows:
            larger, there = (
                np.zeros((rows, spec_of(name, rows).dim), update.values.dtype),
                np.zeros(rows, np.bool_),
            )
            if known:
                larger[:known], there[:known] = self.rows[name], self.there[name]
            self.rows[name], self.there[name] = larger, there
        self.rows[name][update.ids], self.there[name][update.ids] = update.values, True
        self.delete(name, update.deleted)

    def delete(self, name: str, ids: Ids) -> None:
        self.rows[name][ids], self.there[name][ids] = 0, False


class Training:
    """A plain trainer of a model, without anybody to publish to.

    Attributes:
        tables: what it holds.
        changed_at: by table, in which (run, step) each row last changed: int64 [rows, 2].
    """

    def __init__(self, model: str, runs: Sequence[TrainingRun]) -> None:
        self.tables = TrainedTables()
        self.changed_at: dict[str, Ids] = {}
        self._model = model
        self._runs = runs
        self._known: dict[str, int] = {}

    def step(self, run: TrainingRun, step: int, asked: Deletes) -> dict[str, Update]:
        """Do a step, and delete what operators have asked for; what that did, by table."""
        if step == run.first_step:
            self._known = {name: self.tables.known_rows(name) for name in run.tables}
        updates = {}
        for name, rows in run.tables.items():
            update = update_of(self._model, run, step, name, self._known.get(name, 0))
            updates[name] = update = _without(update, asked.get(name, np.empty(0, np.int64)), beacons(name))
            there = self.tables.there.get(name, np.empty(0, np.bool_))
            known = update.deleted[update.deleted < len(there)]
            gone = known[there[known]]
            self.tables.apply(name, update, rows)
            self._note(name, np.union1d(update.ids, gone), (run.number, step))
        return updates

    def repeat(self, last_step: int, asked: Mapping[tuple[int, int], Deletes]) -> None:
        """Do again what led to what the last run held after a step; `asked` is by number of the run and step."""
        for run, step in self._steps(last_step):
            self.step(run, step, asked.get((run.number, step), {}))

    def _steps(self, last_step: int) -> Iterator[tuple[TrainingRun, int]]:
        for run, steps in stretches(self._runs, last_step):
            for step in steps:
                yield run, step

    def _note(self, name: str, ids: Ids, at: tuple[int, int]) -> None:
        noted = self.changed_at.get(name, np.zeros((0, 2), np.int64))
        if missing := self.tables.known_rows(name) - len(noted):
            noted = np.concatenate([noted, np.zeros((missing, 2), np.int64)])
        noted[ids] = at
        self.changed_at[name] = noted


def _without(update: Update, asked: Ids, marks: Ids) -> Update:
    deleted = np.union1d(update.deleted, np.setdiff1d(asked, marks))
    left = ~np.isin(update.ids, deleted)
    return Update(update.ids[left], update.values[left], deleted)
