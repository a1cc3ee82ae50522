"""A model in training, by a plain loop or by a pipeline: its batches, where they come from, and what it holds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.models import CPU, DIM, bags, distributed
from tests.integration.trainer.tracking.rows import Rows, weights
from torch import nn
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.pipelines.batches import FieldsBatch

ROWS, WIDTH = 16, 3


@dataclass
class Batch(FieldsBatch):
    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor


def batches(count: int, size: int = 4, seed: int = 0) -> Iterator[Batch]:
    """This rank's: others have other ones."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        lengths = torch.randint(0, 3, (2 * size,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        yield Batch(
            sparse=KeyedJaggedTensor(["f", "g"], ids, lengths=lengths),
            dense=torch.randn(size, WIDTH, generator=generator),
            label=torch.randn(size, generator=generator),
        )


class Lost(Exception):
    """The connection to where batches come from."""


class Failing(Iterator[Any]):
    """Hands out batches, but at some of their places fails once."""

    def __init__(self, of: Iterable[Any], places: Iterable[int]) -> None:
        self._batches, self._places, self._taken = list(of), set(places), 0

    def __next__(self) -> Any:
        if self._taken in self._places:
            self._places.remove(self._taken)
            raise Lost
        self._taken += 1
        if self._taken > len(self._batches):
            raise StopIteration
        return self._batches[self._taken - 1]


class Paused(Iterator[Any]):
    """Hands out batches as far as they have arrived."""

    def __init__(self, of: Iterable[Any], arrived: int, *, ends: bool) -> None:
        self._batches, self.arrived, self._ends, self.taken = list(of), arrived, ends, 0

    def __next__(self) -> Any:
        if self.taken == self.arrived:
            if self._ends:
                raise StopIteration
            return None
        self.taken += 1
        return self._batches[self.taken - 1]


def despite_losses(pipeline: Any, iterator: Iterator[Any]) -> tuple[list[Any], int]:
    """The outputs, and how many losses there were."""
    outputs, losses = [], 0
    while True:
        try:
            outputs += [pipeline.progress(iterator)]
        except Lost:
            losses += 1
        except StopIteration:
            return outputs, losses


BOTH_RANKS = {"f": table_wise(rank=1, compute_kernel="fused"), "g": row_wise(compute_kernel="fused")}


class Regression(nn.Module):
    """Predicts labels from dense values and looked-up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags("f", "g")
        self.over = nn.Linear(2 * DIM + WIDTH, 1)

    def looked_up(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self.bags(batch.sparse).values()
        return found

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.over(torch.cat([self.looked_up(batch), batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, batch.label)
        return loss, loss.detach()


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Training:
    """A sharded model and its optimizers. Two of the same module begin with the same values, however sharded."""

    def __init__(
        self,
        module: nn.Module,
        sharding: Mapping[str, Any] | None = None,
        *,
        tables: EmbOptimType = EmbOptimType.EXACT_SGD,
        dense: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = sgd,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Tables left out of `sharding` are whole, on rank 0. All ranks train together, or those of a group."""
        self.model = distributed(module, sharding or {}, tables, group)
        fill(self.model)
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, KeyedOptimizerWrapper(rest, dense)])

    def pipeline(self, **options: Any) -> OnlinePipeline:
        return OnlinePipeline(self.model, self.optimizer, CPU, PipelineOptions(**options))

    def plainly(self, batches: Iterable[Any]) -> list[Any]:
        """Train without a pipeline; the outputs."""
        outputs = []
        for batch in batches:
            self.optimizer.zero_grad()
            loss, output = self.model(batch)
            loss.backward()
            self.optimizer.step()
            outputs.append(output)
        return outputs

    def pipelined(self, batches: Iterable[Any], **options: Any) -> list[Any]:
        """Train with a pipeline to the end of the data, and detach it; return the outputs."""
        pipeline = self.pipeline(**options)
        outputs = through(pipeline, batches)
        pipeline.detach()
        return outputs

    def held(self) -> Rows:
        """What this rank holds of every table and parameter."""
        return weights(self.model)


def through(pipeline: Any, batches: Iterable[Any]) -> list[Any]:
    outputs, iterator = [], iter(batches)
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs


def fill(model: nn.Module) -> None:
    """Give every table and parameter values that only its name decides."""
    for name, value in model.state_dict().items():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        whole = torch.empty(value.size()).uniform_(-0.3, 0.3, generator=generator)
        for offsets, shard in _shards(value):
            shard.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, shard.shape, strict=True))])


def _shards(value: Any) -> list[tuple[list[int], torch.Tensor]]:
    if not hasattr(value, "local_shards"):
        return [([0] * value.dim(), value.detach())]
    return [(list(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]


def farthest(some: Rows, others: Rows) -> float:
    """The largest difference between two, over all values that are held; 0.0 if they are equal bit by bit."""
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name].isnan(), others[name].isnan()) for name in some)
    differences = [(some[name] - others[name]).abs().nan_to_num(0.0).max() for name in some]
    return float(max(differences, default=0.0))
