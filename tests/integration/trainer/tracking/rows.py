"""What a rank really holds of a model, from its `state_dict` alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard
from torch.distributed.tensor import DTensor
from torchrec.distributed import DistributedModelParallel

# By FQN, a whole table with NaN in what this rank does not hold.
Rows = dict[str, torch.Tensor]
Ids = dict[str, set[int]]


def weights(model: DistributedModelParallel) -> Rows:
    """A copy of what is held of every table and of every other parameter."""
    parameters = {name for name, _ in model.named_parameters()}
    held = {_table(key): _local(value) for key, value in model.state_dict().items() if key in parameters}
    return {table: _whole(value) for table, value in held.items() if _is_held(value)}


def momenta(model: DistributedModelParallel) -> Rows:
    """A copy of the first state of the fused optimizer; one value per row stands in all columns of its shard."""
    held = model.state_dict()
    found = {}
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        first = [state for name, state in states.items() if name.endswith("momentum1")]
        if first and _is_held(held[key]):
            found[_table(key)] = _placed(held[key], [values for _, values in _shards(first[0])])
    return found


def changed(before: Rows, after: Rows) -> Ids:
    return {table: differing(before[table], rows) for table, rows in after.items()}


def differing(some: torch.Tensor, others: torch.Tensor) -> set[int]:
    """Which rows differ in a bit."""
    assert (some.shape, some.dtype) == (others.shape, others.dtype)
    unequal = some.contiguous().view(torch.uint8) != others.contiguous().view(torch.uint8)
    return set(torch.nonzero(unequal.any(dim=1)).squeeze(1).tolist())


def _table(key: str) -> str:
    """Tables are called as in the `state_dict`, without ".weight"; other parameters as they are there."""
    is_table = ".embedding_bags." in key or ".embeddings." in key
    return key.removesuffix(".weight") if is_table else key


def _is_held(value: Any) -> bool:
    return not hasattr(value, "local_shards") or any(shard.tensor.numel() for shard in value.local_shards())


def _whole(value: Any) -> torch.Tensor:
    if hasattr(value, "local_shards"):
        return _placed(value, [values for _, values in _shards(value)])
    rows: torch.Tensor = value.detach().clone()
    return rows.view(rows.shape[0] if rows.dim() > 1 else 1, -1)


def _placed(weight: Any, by_shard: list[torch.Tensor]) -> torch.Tensor:
    """Values of the shards of a weight, in their places."""
    whole = torch.full(tuple(weight.size()), float("nan"), dtype=by_shard[0].dtype)
    for ((row, column), held), values in zip(_shards(weight), by_shard, strict=True):
        rows, columns = held.shape
        whole[row : row + rows, column : column + columns] = values if values.dim() > 1 else values.unsqueeze(1)
    return whole


@dataclass(frozen=True)
class _LocalShards:
    """What a rank has of a DTensor, which tables are in under a DMPCollection."""

    of: DTensor

    def local_shards(self) -> list[Shard]:
        local = self.of.to_local()
        return [
            Shard(rows, ShardMetadata(list(offsets), list(rows.shape), "rank:0/cpu"))
            for rows, offsets in zip(local.local_shards(), local.local_offsets(), strict=True)
        ]

    def size(self) -> torch.Size:
        return self.of.size()


def _local(value: Any) -> Any:
    return _LocalShards(value) if isinstance(value, DTensor) else value


def _shards(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    found = [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]
    return sorted(found, key=lambda shard: shard[0][::-1])
