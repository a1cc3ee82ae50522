"""Whether replicas hold exactly what the trainer holds, and how fresh and how good they were on the way."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.policy import Policy
from deltasync.core.tables import TableKind, TableSpec
from deltasync.trainer.demo.metrics import auc, log_loss
from deltasync.trainer.demo.processes import DemoFailed

Tables = dict[str, NDArray[Any]]


def trainer_tables(folder: Path, ranks: int) -> Tables:
    """Every table of the trainer, put together from the shards of its ranks.

    Raises:
        DemoFailed: shards of several ranks hold different values for the same place.
    """
    tables: Tables = {}
    seen: dict[str, NDArray[np.bool_]] = {}
    for rank in range(ranks):
        facts = json.loads((folder / f"trainer-{rank}.json").read_text())
        for name, rows, dim, dtype in facts["tables"]:
            tables.setdefault(name, np.zeros((rows, dim), np.dtype(dtype)))
            seen.setdefault(name, np.zeros((rows, dim), np.bool_))
        with np.load(folder / f"tables-trainer-{rank}.npz") as arrays:
            for number, (name, row, column) in enumerate(facts["shards"]):
                _place(
                    tables[name], seen[name], arrays[f"shard{number}"], row, column, f"table {name!r}, rank {rank}"
                )
    if missing := [name for name, filled in seen.items() if not filled.all()]:
        raise DemoFailed(f"no rank holds all of table {missing[0]!r}")
    return tables


def _place(
    table: NDArray[Any], seen: NDArray[np.bool_], block: NDArray[Any], row: int, column: int, where: str
) -> None:
    rows, columns = slice(row, row + block.shape[0]), slice(column, column + block.shape[1])
    before, overlap = table[rows, columns], seen[rows, columns]
    if not np.array_equal(_bits(before)[overlap], _bits(block)[overlap]):
        raise DemoFailed(f"{where}: the ranks' copies differ")
    table[rows, columns] = block
    seen[rows, columns] = True


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def as_released(tables: Tables, policy: Policy, parameters: Collection[str] = ()) -> Tables:
    """The values of these tables as a policy's value type lets replicas have them.

    `parameters` are the names of those that are parameters outside of embedding tables.
    """
    return {name: _as_released(name, rows, policy, name in parameters) for name, rows in tables.items()}


def _as_released(name: str, rows: NDArray[Any], policy: Policy, is_parameter: bool) -> NDArray[Any]:
    kind = TableKind.PARAMETER if is_parameter else TableKind.EMBEDDING
    table = TableSpec(name, len(rows), rows.shape[1], rows.dtype, kind)
    delivery = policy.delivery_of(table)
    return delivery.decode(delivery.encode(rows))


def unequal_rows(trainer: Tables, replica: Tables) -> dict[str, int]:
    """Rows that differ in any bit, by table; a table that only one side has counts whole."""
    unequal = {}
    for name in trainer.keys() | replica.keys():
        ours, theirs = trainer.get(name), replica.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            unequal[name] = len(ours if ours is not None else replica[name])
        elif count := int((_bits(ours) != _bits(theirs)).any(axis=1).sum()):
            unequal[name] = count
    return unequal


@dataclass(frozen=True)
class Quality:
    """AUC and log loss of the trainer, a synced replica and a frozen one, over `events` events."""

    events: int
    auc: dict[str, float]
    log_loss: dict[str, float]


def quality(folder: Path, ranks: int, synced: str, frozen: str, first: int) -> Quality:
    """How good the scores of events `first` and later were.

    Replica `frozen` has a copy that is frozen and scores too, or is frozen itself.

    Raises:
        DemoFailed: the three did not score the same events with the same labels.
    """
    trainer = _sorted([_load(folder / f"scores-trainer-{rank}.npz") for rank in range(ranks)])
    replica, other = (
        _sorted([_load(folder / f"scores-{synced}.npz")]),
        _sorted([_load(folder / f"scores-{frozen}.npz")]),
    )
    for scores in (replica, other):
        for column in ("index", "label"):
            if not np.array_equal(scores[column], trainer[column]):
                raise DemoFailed(f"trainer and replicas did not score the same events: column {column!r} differs")
    later = trainer["index"] >= first
    labels = trainer["label"][later]
    frozen_logit = other["frozen"] if "frozen" in other else other["logit"]
    logits = {"trainer": trainer["logit"], "synced": replica["logit"], "frozen": frozen_logit}
    return Quality(
        len(labels),
        {name: auc(labels, values[later]) for name, values in logits.items()},
        {name: log_loss(labels, values[later]) for name, values in logits.items()},
    )


def _load(path: Path) -> Tables:
    with np.load(path) as arrays:
        return dict(arrays)


def _sorted(parts: list[Tables]) -> Tables:
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["index"])
    return {name: column[order] for name, column in columns.items()}


def freshness(step_ends_unix_ns: list[int], applied: list[tuple[int, int, int]]) -> list[float]:
    """Seconds from the end of every step of the trainer to a replica holding what it changed; 0 where the clock
    was set back in between.

    Args:
        step_ends_unix_ns: when steps 1, 2, ... ended, nanoseconds since 1970.
        applied: version, step and time of every release a replica has applied, in order; a release holds the
            changes of its step and all before.
    """
    steps = np.array([step for _, step, _ in applied])
    first = np.searchsorted(steps, np.arange(1, len(step_ends_unix_ns) + 1))
    return [
        max(0, applied[release][2] - end) / 1e9
        for release, end in zip(first, step_ends_unix_ns, strict=True)
        if release < len(applied)
    ]
