"""Whether replicas are what the trainer's model is: rows, maps of raw ids, buffers and outputs, bit by bit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.policy import Policy
from deltasync.trainer.clicks.model_state import IdMap, ModelState
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.demo.compare import Tables, as_released, trainer_tables, unequal_rows
from deltasync.trainer.demo.gathered import gathered_model, last_outputs
from deltasync.trainer.demo.quantised import quantised, served_rows


@dataclass(frozen=True)
class Holdings:
    """What a replica holds, or should hold.

    Attributes:
        rows: of tables and of parameters outside of them, [rows, dim], by FQN.
        map: raw id + 1 by row, [rows, 1], by the table's short name.
        buffers: as rows, by FQN.
        outputs: `logit` of the last n events, [n, 1].
    """

    rows: Tables
    map: Tables
    buffers: Tables
    outputs: Tables

    def unequal(self, other: "Holdings") -> dict[str, dict[str, int]]:
        """How many rows differ in any bit, by attribute and name; nothing where none does."""
        return {what: unequal_rows(ours, getattr(other, what)) for what, ours in vars(self).items()}


WHATS = ("rows", "map", "buffers", "outputs")


def id_map_shards(folder: Path, ranks: int) -> dict[str, list[IdMap]]:
    """The maps of the trainer's ranks in turn, by the table's short name."""
    by_rank = [ModelState.load(folder / f"state-trainer-{rank}.npz").maps for rank in range(ranks)]
    return {name: [maps[name] for maps in by_rank] for name in by_rank[0]}


def trainer_holdings(folder: Path, ranks: int, stream: StreamOptions, policy: Policy) -> Holdings:
    """What replicas with a policy should hold in the end, by what the trainer's ranks have left in `folder`.

    Buffers are the first rank's. Outputs are those of a model that is gathered from the ranks.

    Raises:
        DemoFailed: the ranks contradict each other.
    """
    parameters = json.loads((folder / "trainer-0.json").read_text())["parameters"]
    tables = trainer_tables(folder, ranks)
    shards = id_map_shards(folder, ranks)
    buffers = ModelState.load(folder / "state-trainer-0.npz").buffers
    if policy.value_type.tbe_bits:
        model = quantised(gathered_model(stream.model, tables, shards, buffers), policy.value_type)
        tables = served_rows(model)
    else:
        tables = as_released(tables, policy, parameters)
        model = gathered_model(stream.model, tables, shards, buffers)
    outputs = last_outputs(model, stream)
    whole = {name: IdMap(0, np.concatenate([part.ids for part in parts])) for name, parts in shards.items()}
    return _holdings(tables, ModelState(whole, buffers), outputs)


def replica_holdings(folder: Path, name: str) -> Holdings:
    """What a replica held in the end."""
    state = ModelState.load(folder / f"state-{name}.npz")
    return _holdings(_load(folder / f"tables-{name}.npz"), state, _load(folder / f"outputs-{name}.npz"))


def _holdings(tables: Tables, state: ModelState, outputs: Tables) -> Holdings:
    maps = {name: its.ids[:, np.newaxis] for name, its in state.maps.items()}
    buffers = {name: _as_rows(its) for name, its in state.buffers.items()}
    return Holdings(tables, maps, buffers, {"logit": outputs["logit"][:, np.newaxis]})


def _as_rows(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(1, -1)


def _load(path: Path) -> Tables:
    with np.load(path) as arrays:
        return dict(arrays)


def off_trainer(folder: Path, expected: Holdings, stream: StreamOptions) -> float:
    """How far the gathered model's outputs are from those of the trainer's first rank, in log odds, at most.

    Ranks add in another order. Other ranks than the first have buffers of their own.
    """
    own = _load(folder / "outputs-trainer-0.npz")
    first = (stream.events or 0) - len(expected.outputs["logit"])
    return float(np.abs(expected.outputs["logit"][own["index"] - first, 0] - own["logit"]).max())


def verdict(expected: Holdings, replicas: dict[str, Holdings]) -> dict[str, Any]:
    """For each of WHATS: `_equal`, whether all replicas hold it bit by bit (None where the model has none of it);
    `_unequal`, how many rows differ, by replica and name; and `_compared`, rows compared.
    """
    unequal = {name: expected.unequal(held) for name, held in replicas.items()}
    found: dict[str, Any] = {}
    for what in WHATS:
        differing = {name: by_what[what] for name, by_what in unequal.items()}
        rows = sum(len(its) for its in getattr(expected, what).values())
        nothing = not rows and not any(differing.values())
        found[f"{what}_equal"] = None if nothing else not any(differing.values())
        found[f"{what}_unequal"] = differing
        found[f"{what}_compared"] = rows * len(replicas)
    return found


def all_equal(report: dict[str, Any]) -> bool:
    """Whether nothing that was compared differs."""
    return all(report.get(f"{what}_equal") is not False for what in WHATS)


def rows_used(shards: dict[str, list[IdMap]]) -> dict[str, list[int]]:
    """Rows that raw ids have, by table, on each rank in turn."""
    return {name: [part.used for part in parts] for name, parts in shards.items()}
