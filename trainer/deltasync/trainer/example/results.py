"""6. Scores and rows, which the demo's processes write to files, and which the demo compares bit by bit."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltasync.client import InvalidInput, Policy, TableKind, TableSpec
from deltasync.trainer.example.processes import DemoFailed

if TYPE_CHECKING:
    from deltasync.trainer.sync import DeltaSync  # Imports torch, which the demo itself does not need.

Tables = dict[str, NDArray[Any]]


def write_arrays(folder: Path, name: str, arrays: Tables) -> None:
    """Write arrays to the file NAME.npz."""
    np.savez(folder / f"{name}.npz", allow_pickle=False, **arrays)


def load_arrays(folder: Path, name: str) -> Tables:
    """Read the arrays that `write_arrays` wrote."""
    with np.load(folder / f"{name}.npz") as arrays:
        return dict(arrays)


def write_shards(folder: Path, rank: int, sync: "DeltaSync") -> None:
    """Write this rank's part of all published tables, and its statistics, for `trainer_tables`."""
    shards = [each for table in sync.tracker.tables for each in table.shards]
    arrays = {f"shard{number}": each.weight.detach().cpu().numpy() for number, each in enumerate(shards)}
    write_arrays(folder, f"tables-trainer-{rank}", arrays)
    tables = {each.shard.table for each in shards}
    facts = {
        "tables": [(table.name, table.rows, table.dim, table.dtype.str) for table in tables],
        "parameters": [table.name for table in tables if not table.kind.ranked],
        "shards": [[each.shard.table.name, each.shard.row_offset, each.shard.col_offset] for each in shards],
        "steps": sync.tracker.steps,
        "versions": sync.stats.sealed,
        "rows": sync.stats.rows,
        "bytes": sync.stats.bytes,
        "absorbed": sync.stats.absorbed,
    }
    (folder / f"trainer-{rank}.json").write_text(json.dumps(facts))


def trainer_facts(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The statistics that `write_shards` wrote, by rank."""
    return [json.loads((folder / f"trainer-{rank}.json").read_text()) for rank in range(ranks)]


def trainer_tables(folder: Path, ranks: int) -> Tables:
    """Assemble every table of the trainer from the shards of its ranks."""
    tables, seen = Tables(), dict[str, NDArray[np.bool_]]()
    for rank, facts in enumerate(trainer_facts(folder, ranks)):
        for name, rows, dim, dtype in facts["tables"]:
            tables.setdefault(name, np.zeros((rows, dim), np.dtype(dtype)))
            seen.setdefault(name, np.zeros((rows, dim), np.bool_))
        blocks = load_arrays(folder, f"tables-trainer-{rank}")
        for number, (name, row, column) in enumerate(facts["shards"]):
            block = blocks[f"shard{number}"]
            place = slice(row, row + block.shape[0]), slice(column, column + block.shape[1])
            tables[name][place], seen[name][place] = block, True
    if missing := [name for name, filled in seen.items() if not filled.all()]:
        raise DemoFailed(f"table {missing[0]!r}: the ranks' shards do not cover all its rows")
    return tables


def as_released(tables: Tables, policy: Policy, parameters: Collection[str] = ()) -> Tables:
    """The values that replicas have after encoding with a policy.

    `parameters` names the tables that are not embedding tables.
    """
    released = {}
    for name, rows in tables.items():
        kind = TableKind.PARAMETER if name in parameters else TableKind.EMBEDDING
        form = policy.form_of(TableSpec(name, len(rows), rows.shape[1], rows.dtype, kind))
        released[name] = form.decode(form.encode(rows))
    return released


def unequal_rows(ours: Tables, theirs: Tables) -> dict[str, int]:
    """Number of rows that differ in any bit, by table. For a table that only one side has, all rows count."""
    unequal = {}
    for name in ours.keys() | theirs.keys():
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            unequal[name] = len(one if one is not None else theirs[name])
        elif differing := np.unique(np.nonzero(_bits(one) != _bits(other))[0]).size:
            unequal[name] = differing
    return unequal


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """The probability that a positive event scores above a negative one; ties count half."""
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise InvalidInput(f"AUC of {positives} positive and {negatives} negative events: both are needed")
    _, rank_of, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    wins = float(mean_rank[rank_of][positive].sum()) - positives * (positives + 1) / 2
    return wins / (positives * negatives)
