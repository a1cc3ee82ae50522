"""Whether replicas hold what trainers hold, row by row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.soak.journal import of_pasts, read_journal
from tests.soak.lineage import TrainingRun
from tests.soak.rank import asked_of, journal_file
from tests.soak.stores import KEYS, TOLD
from tests.soak.training import Training, spec_of

from deltasync.core.policy import Policy
from deltasync.core.rows import Values
from deltasync.core.table_form import Mode
from deltasync.trainer.example.results import Tables, as_released, trainer_tables, unequal_rows


@dataclass(frozen=True)
class Trained:
    """What a trainer held in the end.

    Attributes:
        rows: [rows, dim] by table.
        parameters: names of those that are parameters outside of embedding tables.
        training: of a plain trainer, what has led there.
        versions: of a plain trainer, the version of each (run, step) that was acknowledged in the newest history.
    """

    rows: Tables
    parameters: Sequence[str] = ()
    training: Training | None = None
    versions: Mapping[tuple[int, int], int] | None = None


def trained_plain(
    folder: Path, model: str, runs: Sequence[TrainingRun], put_back_unix_ns: Sequence[int] = ()
) -> Trained:
    """What a plain trainer held after the last step that was acknowledged: done again.

    `put_back_unix_ns` says when the service's directory was put back by hand.
    """
    asked = {key: rows for run in runs for key, rows in asked_of(folder, model, run).items()}
    lines = [(run.number, line) for run in runs for line in _versions(folder, model, run, put_back_unix_ns)]
    newest = max((line for _, line in lines), key=lambda line: line["unix_ns"])
    versions = {(n, line["step"]): line["version"] for n, line in lines if line["history"] == newest["history"]}
    training = Training(model, runs)
    training.repeat(max(line["step"] for number, line in lines if number == runs[-1].number), asked)
    return Trained(dict(training.tables.rows), (), training, versions)


def trained_clicks(folder: Path, ranks: int) -> Trained:
    """What the TorchRec trainer's ranks held."""
    facts = json.loads((folder / "trainer-0.json").read_text())
    return Trained(trainer_tables(folder, ranks), facts["parameters"])


def twice_acknowledged(
    folder: Path, model: str, runs: Sequence[TrainingRun], put_back_unix_ns: Sequence[int] = ()
) -> int:
    """How many positions were acknowledged for two different steps: the service has forgotten the first one. Those
    count that were acknowledged between the same times at which its directory was put back by hand.
    """
    steps: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for run in runs:
        for line in _versions(folder, model, run, put_back_unix_ns):
            steps.setdefault((line["history"], line["version"]), set()).add((run.number, line["step"]))
    return sum(len(each) > 1 for each in steps.values())


def _versions(
    folder: Path, model: str, run: TrainingRun, put_back_unix_ns: Sequence[int]
) -> list[Mapping[str, Any]]:
    ranks = range(run.ranks)
    lines = [line for rank in ranks for line in read_journal(journal_file(folder, model, run.number, rank))]
    return of_pasts([line for line in lines if "version" in line], put_back_unix_ns)


def unequal(trained: Trained, policy: Policy, held: Tables) -> dict[str, int]:
    """Rows that a replica of a consumer with this policy holds otherwise than the trainer, by table."""
    if policy.mode is Mode.IDS:
        return _untold(trained, held)
    wanted = as_released(_followed(trained, policy), policy, trained.parameters)
    if any(name.startswith(KEYS) for name in held):
        wanted, held = _by_key(trained, wanted), _all_keys(held, wanted)
    return unequal_rows(wanted, held)


def _followed(trained: Trained, policy: Policy) -> Tables:
    return {name: rows for name, rows in trained.rows.items() if policy.follows(spec_of(name, len(rows)))}


def _by_key(trained: Trained, wanted: Tables) -> Tables:
    """Rows, and beside them whether they are there."""
    there = trained.training.tables.there if trained.training else {}
    return wanted | {KEYS + name: there[name].astype("<u1")[:, np.newaxis] for name in wanted}


def _all_keys(held: Tables, wanted: Tables) -> Tables:
    """The same of what a store by key holds."""
    found: Tables = {}
    for name in {name for name in held if not name.startswith(KEYS)}:
        keys, rows = held[KEYS + name], len(wanted.get(name, held[KEYS + name]))
        inside = keys < rows
        found[name] = np.zeros((rows, held[name].shape[1]), held[name].dtype)
        found[KEYS + name] = np.zeros((rows, 1), "<u1")
        found[name][keys[inside]], found[KEYS + name][keys[inside]] = held[name][inside], 1
        if not inside.all():
            found[KEYS + name] = np.zeros((0, 1), "<u1")
    return found


def _untold(trained: Trained, held: Tables) -> dict[str, int]:
    """Rows that a consumer of ids was not told of since they last changed.

    Who holds nothing is not told of rows that are deleted.
    """
    there = trained.training.tables.there if trained.training else {}
    missing: dict[str, int] = {}
    for name, rows in trained.rows.items():
        told = held.get(TOLD + name, np.zeros(len(rows), np.int64))
        if len(told) != len(rows):
            missing[name] = len(rows)
            continue
        late = told < _changed_with(trained, name)
        if count := int((late & (there[name] | (told > 0))).sum()):
            missing[name] = count
    return missing


def _changed_with(trained: Trained, name: str) -> Values:
    """The version with which each row of a table was last acknowledged."""
    if trained.training is None or trained.versions is None:
        raise TypeError(f"table {name!r} is of no plain trainer")
    at = trained.training.changed_at[name]
    return np.array([trained.versions.get((int(run), int(step)), 0) for run, step in at], np.int64)
