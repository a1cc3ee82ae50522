"""Random batches for the models of `models.py`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import FieldsBatch

SIZE, LONGEST = 4, 3
# Batches in which rank 1, or every rank, has no id at all.
IDLE_RANK, IDLE = 3, 5


@dataclass
class Batch(FieldsBatch):
    sparse: KeyedJaggedTensor


@dataclass(frozen=True)
class Features:
    """What random batches have.

    Attributes:
        below: what the ids of each feature are below.
        weighted: ids have weights.
        variable: features differ in the number of their samples.
    """

    below: Mapping[str, int]
    weighted: bool = False
    variable: bool = False

    def batches(self, count: int) -> Iterator[Batch]:
        """Batches of this rank."""
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        for number in range(count):
            idle = number == IDLE or (number == IDLE_RANK and dist.get_rank() == 1)
            yield Batch(self._batch(0 if idle else LONGEST, generator))

    def _batch(self, longest: int, generator: torch.Generator) -> KeyedJaggedTensor:
        lengths = torch.randint(longest + 1, (sum(self._sizes),), generator=generator, dtype=torch.int32)
        below = torch.tensor(list(self.below.values())).repeat_interleave(torch.tensor(self._sizes))
        values = torch.rand(int(lengths.sum()), generator=generator) * below.repeat_interleave(lengths)
        weights = torch.rand(len(values), generator=generator) + 0.5 if self.weighted else None
        return KeyedJaggedTensor(list(self.below), values.long(), weights, lengths, **self._strides())

    @property
    def _sizes(self) -> list[int]:
        return [SIZE - number % 2 if self.variable else SIZE for number in range(len(self.below))]

    def _strides(self) -> dict[str, Any]:
        if not self.variable:
            return {}
        inverse = torch.stack([torch.arange(SIZE) % size for size in self._sizes])
        return {
            "stride_per_key_per_rank": [[size] for size in self._sizes],
            "inverse_indices": (list(self.below), inverse),
        }
