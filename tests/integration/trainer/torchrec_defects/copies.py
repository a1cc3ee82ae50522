"""What tables hold according to the model's `state_dict`, and copies of them that are built from deltas."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.tracker import Tracker


def _parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tables are called without the `.weight` of their keys."""
    for key, weight in model.state_dict().items():
        if key.endswith((".weight", ".bias")):
            yield key.removesuffix(".weight") if "embedding" in key else key, weight


def held(model: nn.Module) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Each shard of this rank: the FQN of its table, the offset of its rows and columns, its weights."""
    for fqn, weight in _parameters(model):
        if isinstance(weight, ShardedTensor):
            for shard in weight.local_shards():
                row, column = shard.metadata.shard_offsets
                yield fqn, row, column, shard.tensor
        else:
            yield fqn, 0, 0, weight.view(1, -1) if weight.dim() == 1 else weight


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tables as far as this rank holds them; the rest is NaN."""
    tables: dict[str, torch.Tensor] = {}
    for fqn, weight in _parameters(model):
        shape = tuple(weight.size())
        tables[fqn] = torch.full(shape if len(shape) > 1 else (1, *shape), float("nan"))
    for fqn, row, column, weight in held(model):
        rows, columns = weight.shape
        tables[fqn][row : row + rows, column : column + columns] = weight.detach()
    return tables


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Global ids of the rows that differ from what they were, by table."""
    found = {}
    for fqn, now in weights(model).items():
        same = (now == before[fqn]) | (now.isnan() & before[fqn].isnan())
        found[fqn] = torch.nonzero(~same.all(dim=1)).squeeze(1).tolist()
    return {fqn: ids for fqn, ids in found.items() if ids}


def ids_of(delta: Delta) -> dict[str, list[int]]:
    return {fqn: ids.tolist() for fqn, ids in delta.ids.items()}


class Copy:
    """The tables of a receiver who has nothing, and is then given the deltas of one consumer."""

    def __init__(self, model: nn.Module, tracker: Tracker, consumer: str | None = None) -> None:
        self._tracker, self._consumer = tracker, consumer
        self._tables = {fqn: torch.full_like(rows, float("nan")) for fqn, rows in weights(model).items()}
        tracker.resync(consumer)

    def update(self) -> dict[str, list[int]]:
        """Take what has changed, and say so; its ids."""
        delta = self._tracker.get_delta(self._consumer)
        self.take(delta)
        self._tracker.acknowledge(delta.token)
        return ids_of(delta)

    def take(self, delta: Delta) -> None:
        for fqn, rows in delta.rows.items():
            assert rows.values is not None
            at = 0
            for column, width in rows.columns:
                self._tables[fqn][rows.ids, column : column + width] = rows.values[:, at : at + width]
                at += width

    def check(self, model: nn.Module) -> None:
        """Nothing of what this rank holds differs in a bit."""
        for fqn, row, column, weight in held(model):
            rows, columns = weight.shape
            ours = self._tables[fqn][row : row + rows, column : column + columns]
            wrong = torch.nonzero((ours != weight).any(dim=1)).squeeze(1) + row
            assert not len(wrong), f"{fqn}: rows {wrong.tolist()} differ"
