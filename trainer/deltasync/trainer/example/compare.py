"""Writes and reads the results of the demo's processes, and compares replicas with the trainer bit by bit."""

import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from deltasync.core.policy import Policy
from deltasync.core.tables import FREE_ID, TableKind, TableSpec
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickModel, click_batch, outputs, quantised, served_rows
from deltasync.trainer.example.options import RAW_IDS, ModelOptions, StreamOptions
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.stream import batches
from deltasync.trainer.sync import DeltaSync

Tables = dict[str, NDArray[Any]]
Holdings = dict[str, Tables]
"""What a replica has, or should have, under each name in WHATS.

`rows`: tables and other parameters, by FQN. `map`: entries of raw ids by row, by the table's short name.
`buffers`: buffers as rows, by FQN. `outputs`: the `logit` of the last events.
"""
WHATS = ("rows", "map", "buffers", "outputs")


@dataclass(frozen=True, eq=False)
class IdMap:
    """The raw ids of a table's rows, or of one rank's share of them.

    Attributes:
        first_row: global number of the first of these rows.
        ids: int64 [rows], entries of raw ids by row (see `core.tables`), 0 for free rows.
    """

    first_row: int
    ids: NDArray[np.int64]


def id_maps(model: nn.Module) -> dict[str, IdMap]:
    """The map of each managed table, or this rank's share of it, by the table's short name."""
    maps = {}
    for name, module in model.named_modules():
        if isinstance(module, MCHManagedCollisionModule):
            sorted_ids, rows = module._mch_sorted_raw_ids.cpu(), module._mch_remapped_ids_mapping.cpu()
            first = int(rows.min())
            ids = torch.zeros(len(rows), dtype=torch.int64)
            ids[rows - first] = sorted_ids ^ FREE_ID
            maps[name.rpartition(".")[2]] = IdMap(first, ids.numpy())
    return maps


def save_state(model: nn.Module, file: Path) -> None:
    """Write a model's maps of raw ids, and its buffers by FQN, each as one row."""
    whole = get_unwrapped_module(model)
    buffers = {
        f"{part}.{name}": buffer.cpu().reshape(1, -1)
        for part in ("bottom", "top")
        for name, buffer in whole.get_submodule(part).named_buffers()
    }
    maps = {name: (its.first_row, torch.from_numpy(its.ids)) for name, its in id_maps(model).items()}
    torch.save({"maps": maps, "buffers": buffers}, file)


def load_state(file: Path) -> tuple[dict[str, IdMap], dict[str, NDArray[Any]]]:
    """Read the maps and the buffers that `save_state` wrote."""
    state = torch.load(file, weights_only=True)
    maps = {name: IdMap(first_row, ids.numpy()) for name, (first_row, ids) in state["maps"].items()}
    return maps, {name: buffer.numpy() for name, buffer in state["buffers"].items()}


class TrainerResults:
    """Collects a rank's scores, ends of steps and evictions. Construct it before the first step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._scored: list[tuple[torch.Tensor, ...]] = []
        self._step_ends_unix_ns: list[int] = []
        self._maps, self.evictions = id_maps(model), 0

    def add(self, scored: tuple[torch.Tensor, ...], *, stepped: bool) -> None:
        """Keep index, logit and label of a batch; `stepped` says whether it has just completed a step."""
        self._scored.append(scored)
        if stepped:
            self._step_ends_unix_ns.append(time.time_ns())
            self.count_evictions()

    def count_evictions(self) -> None:
        """Count the rows that have moved from one raw id to another since the last call."""
        now = id_maps(self._model)
        for name, after in now.items():
            before = self._maps[name].ids
            self.evictions += int(((before != after.ids) & (before != 0) & (after.ids != 0)).sum())
        self._maps = now

    def write(self, folder: Path, rank: int, sync: DeltaSync, last: Any) -> None:
        """Write this rank's scores, shards, state and statistics, and its outputs for the batch `last`.

        All ranks call this together, after the pipeline has detached from the model.
        """
        index, logit, label = (torch.cat(column).cpu().numpy() for column in zip(*self._scored, strict=True))
        np.savez(folder / f"scores-trainer-{rank}.npz", index=index, logit=logit, label=label)
        with torch.no_grad():
            _, (index, logit, _) = self._model.eval()(last)
        np.savez(folder / f"outputs-trainer-{rank}.npz", index=index.cpu().numpy(), logit=logit.cpu().numpy())
        save_state(self._model, folder / f"state-trainer-{rank}.pt")
        stats = sync.stats
        facts = {
            "steps": sync.tracker.steps,
            "step_ends_unix_ns": self._step_ends_unix_ns,
            "versions": len(stats.cuts),
            "rows": stats.rows,
            "bytes": stats.bytes,
            "absorbed": stats.absorbed,
            "evictions": self.evictions,
        }
        write_shards(folder, rank, sync, facts)


def write_shards(folder: Path, rank: int, sync: DeltaSync, facts: dict[str, Any]) -> None:
    """Write this rank's weights for `trainer_tables`, and their positions together with other `facts`."""
    trained = [each for table in sync.tracker.tables if table.table.kind.trained for each in table.shards]
    arrays = {f"shard{number}": each.weight.detach().cpu().numpy() for number, each in enumerate(trained)}
    np.savez(folder / f"tables-trainer-{rank}.npz", allow_pickle=False, **arrays)
    tables = {each.shard.table for each in trained}
    places = {
        "tables": [(table.name, table.rows, table.dim, table.dtype.str) for table in tables],
        "parameters": [table.name for table in tables if not table.kind.ranked],
        "shards": [[each.shard.table.name, each.shard.row_offset, each.shard.col_offset] for each in trained],
    }
    (folder / f"trainer-{rank}.json").write_text(json.dumps(facts | places))


def id_map_shards(folder: Path, ranks: int) -> dict[str, list[IdMap]]:
    """The maps of all trainer ranks in order, by the table's short name."""
    by_rank = [load_state(folder / f"state-trainer-{rank}.pt")[0] for rank in range(ranks)]
    return {name: [maps[name] for maps in by_rank] for name in by_rank[0]}


def trainer_holdings(
    folder: Path, ranks: int, stream: StreamOptions, sizes: ModelOptions, policy: Policy
) -> Holdings:
    """The rows that replicas with a policy should have at the end, from the files of the trainer's ranks.

    Buffers are those of the first rank. Outputs are those of a model gathered from all ranks.
    """
    parameters = json.loads((folder / "trainer-0.json").read_text())["parameters"]
    tables, shards = trainer_tables(folder, ranks), id_map_shards(folder, ranks)
    buffers = load_state(folder / "state-trainer-0.pt")[1]
    if policy.value_type.tbe_bits:
        model = quantised(gathered_model(sizes, tables, shards, buffers), policy.value_type)
        tables = served_rows(model)
    else:
        tables = as_released(tables, policy, parameters)
        model = gathered_model(sizes, tables, shards, buffers)
    maps = {name: np.concatenate([part.ids for part in parts]) for name, parts in shards.items()}
    logit = _last_logits(model, stream, sizes)
    return {"rows": tables, "map": maps, "buffers": buffers, "outputs": {"logit": logit}}


def replica_holdings(folder: Path, name: str) -> Holdings:
    """The rows that a replica had at the end."""
    maps, buffers = load_state(folder / f"state-{name}.pt")
    tables, logits = (load_arrays(folder / f"{part}-{name}.npz") for part in ("tables", "outputs"))
    ids = {table: its.ids for table, its in maps.items()}
    return {"rows": tables, "map": ids, "buffers": buffers, "outputs": logits}


def load_arrays(file: Path) -> Tables:
    """The arrays of an .npz file."""
    with np.load(file) as arrays:
        return dict(arrays)


def trainer_tables(folder: Path, ranks: int) -> Tables:
    """Assemble every table of the trainer from the shards of its ranks."""
    tables, seen = Tables(), dict[str, NDArray[np.bool_]]()
    for rank in range(ranks):
        facts = json.loads((folder / f"trainer-{rank}.json").read_text())
        for name, rows, dim, dtype in facts["tables"]:
            tables.setdefault(name, np.zeros((rows, dim), np.dtype(dtype)))
            seen.setdefault(name, np.zeros((rows, dim), np.bool_))
        blocks = load_arrays(folder / f"tables-trainer-{rank}.npz")
        for number, (name, row, column) in enumerate(facts["shards"]):
            block = blocks[f"shard{number}"]
            place = slice(row, row + block.shape[0]), slice(column, column + block.shape[1])
            both = seen[name][place]
            if not np.array_equal(_bits(tables[name][place])[both], _bits(block)[both]):
                raise DemoFailed(f"table {name!r}, rank {rank}: the ranks' copies differ")
            tables[name][place], seen[name][place] = block, True
    if missing := [name for name, filled in seen.items() if not filled.all()]:
        raise DemoFailed(f"table {missing[0]!r}: the ranks' shards do not cover all its rows")
    return tables


def as_released(tables: Tables, policy: Policy, parameters: Collection[str] = ()) -> Tables:
    """The values that replicas have after encoding with a policy. `parameters` names parameters outside tables."""
    released = {}
    for name, rows in tables.items():
        kind = TableKind.PARAMETER if name in parameters else TableKind.EMBEDDING
        form = policy.form_of(TableSpec(name, len(rows), rows.shape[1], rows.dtype, kind))
        released[name] = form.decode(form.encode(rows))
    return released


def unequal_rows(trainer: Tables, replica: Tables) -> dict[str, int]:
    """Number of rows that differ in any bit, by table. For a table that only one side has, all rows count."""
    unequal = {}
    for name in trainer.keys() | replica.keys():
        ours, theirs = trainer.get(name), replica.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            unequal[name] = len(ours if ours is not None else replica[name])
        elif differing := np.unique(np.nonzero(_bits(ours) != _bits(theirs))[0]).size:
            unequal[name] = differing
    return unequal


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def verdict(expected: Holdings, replicas: Mapping[str, Holdings]) -> dict[str, Any]:
    """Compare replicas with the expected state.

    For each name in WHATS the result has `NAME_equal`, which is None if the model has none of it; `NAME_unequal`,
    the number of differing rows by replica and table; and `NAME_compared`, the number of compared rows.
    """
    found = dict[str, Any]()
    for what in WHATS:
        ours = expected[what]
        differing = {name: unequal_rows(ours, held[what]) for name, held in replicas.items()}
        rows, equal = sum(map(len, ours.values())), not any(differing.values())
        found[f"{what}_equal"] = None if equal and not rows else equal
        found[f"{what}_unequal"] = differing
        found[f"{what}_compared"] = rows * len(replicas)
    return found


class GatheredIds(nn.Module):
    """Looks up raw ids like all ranks together. Shares no code with the replicas that are compared with it."""

    def __init__(self, bags: EmbeddingBagCollection, shards: Mapping[str, list[IdMap]]) -> None:
        super().__init__()
        self._bags, self._shards = bags, shards

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, None]:
        """Return the same as a managed collision module."""
        rows = {}
        for table in self._bags.embedding_bag_configs():
            for name in table.feature_names:
                found = rows_of(self._shards[table.name], features[name].values().numpy())
                rows[name] = JaggedTensor(torch.from_numpy(found), lengths=features[name].lengths())
        return self._bags(KeyedJaggedTensor.from_jt_dict(rows)), None


def rows_of(shards: list[IdMap], raw_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The global rows of raw ids, [n], given the maps of all ranks in order.

    Each rank has one range of raw ids. Raw ids without a row share the rank's last row.
    """
    row_of = dict[int, int]()
    for shard in shards:
        row_of |= {named ^ FREE_ID: row for row, named in enumerate(shard.ids.tolist(), shard.first_row) if named}
    last_rows = [shard.first_row + len(shard.ids) - 1 for shard in shards]
    share = -(-RAW_IDS // len(shards))
    return np.array([row_of.get(raw, last_rows[raw // share]) for raw in raw_ids.tolist()], np.int64)


def gathered_model(
    sizes: ModelOptions, tables: Tables, shards: Mapping[str, list[IdMap]], buffers: Tables
) -> ClickModel:
    """An unsharded model in evaluation mode with these tables, maps and buffers."""
    model = ClickModel(sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = tables[name] if name in tables else tables[name.removesuffix(".weight")]
            parameter.copy_(torch.from_numpy(rows).view_as(parameter))
        for name, values in buffers.items():
            buffer = model.get_buffer(name)
            buffer.copy_(torch.from_numpy(values).view_as(buffer))
    if model.managed is not None:
        model.managed = GatheredIds(model.managed._embedding_module, shards)
    return model


def _last_logits(model: ClickModel, stream: StreamOptions, sizes: ModelOptions) -> NDArray[Any]:
    """Log odds for the events of a stream's last batch."""
    featurizer = Featurizer(sizes)
    for features in map(featurizer.features, batches(stream, sizes)):
        last = features
    # Use one thread like the replicas, because more threads may add up sums in another order.
    torch.set_num_threads(1)
    # The first lookup logs a warning that only concerns TorchRec's authors.
    logging.getLogger("torch.fx._symbolic_trace").disabled = True
    return outputs(model, click_batch(last)).numpy()
