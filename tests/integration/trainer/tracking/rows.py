"""What a rank really holds of a model, from its `state_dict` alone."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchrec.distributed import DistributedModelParallel

# By FQN, a whole table with NaN in what this rank does not hold.
Rows = dict[str, torch.Tensor]
Ids = dict[str, set[int]]


def weights(model: DistributedModelParallel) -> Rows:
    """A copy of what is held of every table and of every other parameter."""
    parameters = {name for name, _ in model.named_parameters()}
    held = {_table(key): value for key, value in model.state_dict().items() if key in parameters}
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
    return not _is_sharded(value) or any(values.numel() for _, values in _shards(value))


def _is_sharded(value: Any) -> bool:
    """Under a DMPCollection, shards are in DTensors."""
    return isinstance(value, DTensor) or hasattr(value, "local_shards")


def _whole(value: Any) -> torch.Tensor:
    if _is_sharded(value):
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


def _shards(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        pieces: Any = zip(
            local.local_offsets(), local.local_shards(), strict=False
        )  # A rank without any has an offset.
    else:
        pieces = ((shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards())
    found = [(tuple(offsets), values.detach()) for offsets, values in pieces]
    return sorted(found, key=lambda shard: shard[0][::-1])
