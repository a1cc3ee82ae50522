"""Ways to train."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from tests.integration.trainer.tracking.batches import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions


class Pipeline(Protocol):
    def progress(self, batches: Iterator[Batch]) -> Any:
        """Train on one batch."""


@dataclass(frozen=True)
class Training:
    """A way to train.

    Attributes:
        pipeline: is made of the model and its optimizer.
        batches_per_step: after how many batches an optimizer step is complete.
        lets_go: the model can be called without the pipeline afterwards.
    """

    pipeline: Callable[[DistributedModelParallel, CombinedOptimizer, torch.device], Pipeline]
    batches_per_step: int = 1
    lets_go: bool = False


class MicroBatches:
    """A loop of one's own: a step of two batches, each by the module that `DistributedModelParallel` wraps."""

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer, _: torch.device) -> None:
        self._model, self._optimizer = model, optimizer
        self._seen = 0

    def progress(self, batches: Iterator[Batch]) -> None:
        self._model.module(next(batches))[0].backward()
        self._seen += 1
        if self._seen % 2 == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def _accumulating(model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device) -> Pipeline:
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    config = GradientAccumulationConfig(num_steps=2)
    accumulating: Pipeline = GradientAccumulationWrapper(pipeline, optimizer, model, config)
    return accumulating


def _online(**options: Any) -> Callable[[DistributedModelParallel, CombinedOptimizer, torch.device], Pipeline]:
    return partial(OnlinePipeline, options=PipelineOptions(**options))


TRAININGS = {
    "Base": Training(TrainPipelineBase, lets_go=True),
    "SparseDist": Training(TrainPipelineSparseDist, lets_go=True),
    "Online": Training(_online(), lets_go=True),
    "Online-accumulating": Training(_online(grad_accum=2), batches_per_step=2, lets_go=True),
    "Online-tables-too": Training(_online(grad_accum=2, accumulate_tables=True), batches_per_step=2),
    # Its loss scale is too large for the first steps, which change nothing.
    "Online-float16": Training(_online(enable_amp=True, amp_dtype=torch.float16)),
    "Lite": Training(TrainPipelineSparseDistLite),
    "SemiSync": Training(TrainPipelineSemiSync),
    "Fused": Training(TrainPipelineFusedSparseDist),
    "Fused-new": Training(partial(TrainPipelineFusedSparseDist, emb_lookup_stream="new")),
    "Fused-current": Training(partial(TrainPipelineFusedSparseDist, emb_lookup_stream="current")),
    "Fused-late": Training(partial(TrainPipelineFusedSparseDist, embedding_lookup_after_data_dist=True)),
    "accumulating": Training(_accumulating, batches_per_step=2),
    "micro-batches": Training(MicroBatches, batches_per_step=2, lets_go=True),
}


def stand_in_for_a_gpu() -> None:
    """Have what TorchRec and FBGEMM only do on a GPU run on a CPU too."""
    # Pipelines that look rows up ahead: the streams of a CPU do nothing.
    _patch(KeyedJaggedTensor, "record_stream", lambda *_: None)
    _patch(torch.Tensor, "record_stream", lambda *_: None)
    _patch(torch, "get_device_module", lambda *_: torch.cpu)
    # TorchRec 1.9 asks a stream for its device.
    torch.cpu.Stream.device = torch.device("cpu")  # type: ignore[attr-defined]
    # Evictions by managed collision.
    _patch(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", _reset)
    # Several kernels with variable batches: the way that TorchRec goes where kernels cannot write into one output.
    _patch(GroupedPooledEmbeddingsLookup, "_forward_with_vbe_merging", _merge_outputs)


def _patch(owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
    assert hasattr(owner, name)
    setattr(owner, name, stand_in)


def _reset(kernel: Any, pruned_indices: torch.Tensor, logical_table_ids: torch.Tensor, **_: Any) -> None:
    table = int(logical_table_ids)
    for tensor in (kernel.split_embedding_weights()[table], *kernel.split_optimizer_states()[table]):
        tensor[pruned_indices] = 0


def _merge_outputs(lookup: Any, features_by_group: list[KeyedJaggedTensor], device: torch.device) -> torch.Tensor:
    merged: torch.Tensor = lookup._merge_variable_batch_embeddings(
        lookup._forward(features_by_group), lookup._vbe_splits(features_by_group)
    )
    return merged
