"""Batches as TorchRec's pipelines take them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from deltasync.trainer.clicks.features import Features

SPARSE_FEATURES = ("user", "item", "cross", "hour", "history")
"""Keys of ClickBatch.sparse, in their order; all but `history` have one id per event."""


@dataclass
class FieldsBatch(Pipelineable):  # type: ignore[misc]  # torchrec's types are not followed
    """A batch that is a dataclass of tensors, of whatever kind."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until `stream` has done its work on them."""
        for f in fields(self):
            getattr(self, f.name).record_stream(stream)

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, from which copies to an accelerator need not wait."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Callable[[Any], Any]) -> Self:
        return type(self)(**{f.name: function(getattr(self, f.name)) for f in fields(self)})


@dataclass
class ClickBatch(FieldsBatch):
    """One rank's B events of a batch."""

    dense: torch.Tensor
    """float32 [B, 4]"""
    sparse: KeyedJaggedTensor
    """keys SPARSE_FEATURES, stride B, values int64, lengths int32"""
    label: torch.Tensor
    """float32 [B], 0 or 1"""
    index: torch.Tensor
    """int64 [B], position of the events in the stream"""


def click_batch(features: Features, rank: int = 0, world_size: int = 1) -> ClickBatch:
    """Return rank r's events r, r + world_size, ... as a batch that shares no memory with `features`.

    All ranks get equally many events, as TorchRec needs: up to world_size - 1 events at the end are left out.
    So fewer events than ranks make an empty batch on every rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1} in a world of {world_size}, not {rank}")
    mine = slice(rank, len(features) - len(features) % world_size, world_size)
    return ClickBatch(
        dense=torch.tensor(features.dense[mine]),
        sparse=_sparse(features, mine),
        label=torch.tensor(features.label[mine]),
        index=torch.tensor(features.index[mine]),
    )


def as_tensordict(batch: ClickBatch) -> TensorDict:
    """The same as a TensorDict of batch size [B]: sparse features under their own keys, as nested tensors."""
    sparse = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets())
        for key, jagged in batch.sparse.to_dict().items()
    }
    rest = {"dense": batch.dense, "label": batch.label, "index": batch.index}
    return TensorDict({**sparse, **rest}, batch_size=[batch.label.numel()])


def _sparse(features: Features, mine: slice) -> KeyedJaggedTensor:
    single = [features.ids[key][mine] for key in SPARSE_FEATURES[:-1]]
    history_lengths = features.history_lengths[mine]
    ones = np.ones(sum(ids.size for ids in single), dtype=np.int32)
    return KeyedJaggedTensor(
        keys=list(SPARSE_FEATURES),
        values=torch.from_numpy(np.concatenate([*single, _history(features, mine)])),
        lengths=torch.from_numpy(np.concatenate([ones, history_lengths])),
        stride=history_lengths.size,
    )


def _history(features: Features, mine: slice) -> NDArray[np.int64]:
    chosen = np.zeros(len(features), dtype=np.bool_)
    chosen[mine] = True
    return features.history[np.repeat(chosen, features.history_lengths)]
