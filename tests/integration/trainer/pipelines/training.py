"""A model in training, by a plain loop or by a pipeline, and what it holds afterwards."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.models import CPU, distributed
from tests.integration.trainer.tracking.rows import Rows, weights
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions


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
        """Train with a pipeline, until it says that there is no more, and detach it; the outputs."""
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
