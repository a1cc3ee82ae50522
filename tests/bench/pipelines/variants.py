"""The ways to train that the pipeline benchmark compares."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from tests.bench.pipelines.batches import BatchKind
from tests.bench.pipelines.model import BagModel, PreprocessedModel, TensorDictModel
from tests.bench.pipelines.options import GRAD_ACCUM
from tests.bench.tracker_reads import tracked
from torch import nn
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.sync import DeltaSync, SyncOptions


class Pipeline(Protocol):
    def progress(self, dataloader_iter: Iterator[Any], /) -> torch.Tensor:
        """Train on the next batch; its loss."""


@dataclass(frozen=True)
class VariantContext:
    """What a variant needs beside its model."""

    service: str
    cut_every: int


_Step = Callable[[], None]


def _nothing() -> None:
    pass


@contextmanager
def _alone(_model: nn.Module, _context: VariantContext) -> Iterator[_Step]:
    yield _nothing


@contextmanager
def _tracked(model: nn.Module, context: VariantContext) -> Iterator[_Step]:
    with tracked(model, context.cut_every) as (_, after_step):
        yield after_step


@contextmanager
def _published(model: nn.Module, context: VariantContext) -> Iterator[_Step]:
    options = SyncOptions(service=context.service, model="bench", publish_every=context.cut_every)
    with DeltaSync(model, options) as sync:
        sync.flush()
        yield sync.step


def _ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any
) -> OnlinePipeline:
    return OnlinePipeline(model, optimizer, device, PipelineOptions(**options))


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        pipeline: makes one of a model, an optimizer and a device.
        model: what is trained.
        beside: says, for as long as it is trained, what is done after each step.
        batches: what it is given.
        against: the variant whose step time this one's is compared with.
        not_on_cpu: why it cannot train on a CPU; empty where it can.
    """

    pipeline: Callable[..., Pipeline] = _ours
    model: type[BagModel] = BagModel
    beside: Callable[[nn.Module, VariantContext], AbstractContextManager[_Step]] = _alone
    batches: BatchKind = BatchKind.KJT
    against: str | None = "ours"
    not_on_cpu: str = ""


_semi_sync = partial(TrainPipelineSemiSync, start_batch=0)
_INSIDE = BatchKind.TENSORDICT_INSIDE
_NO_CPU_STREAMS = "TorchRec 1.8 passes a CPU's stream to KeyedJaggedTensor.record_stream, which takes GPUs' alone"

VARIANTS = {
    "base": Variant(TrainPipelineBase, against="sparse_dist"),
    "base_tensordict": Variant(TrainPipelineBase, batches=_INSIDE, against="base"),
    "sparse_dist": Variant(TrainPipelineSparseDist, against=None),
    "sparse_dist_tensordict": Variant(TrainPipelineSparseDist, batches=_INSIDE, against="sparse_dist"),
    "semi_sync": Variant(_semi_sync, against="sparse_dist", not_on_cpu=_NO_CPU_STREAMS),
    "semi_sync_tensordict": Variant(_semi_sync, batches=_INSIDE, against="semi_sync", not_on_cpu=_NO_CPU_STREAMS),
    "ours": Variant(against="sparse_dist"),
    "tensordict": Variant(model=TensorDictModel, batches=BatchKind.TENSORDICT),
    "accumulation": Variant(partial(_ours, grad_accum=GRAD_ACCUM)),
    "accumulation_tables": Variant(partial(_ours, grad_accum=GRAD_ACCUM, accumulate_tables=True)),
    "amp": Variant(partial(_ours, enable_amp=True)),
    "sparse_dist_preprocessing": Variant(
        partial(TrainPipelineSparseDist, pipeline_postproc=True), PreprocessedModel, against="sparse_dist"
    ),
    "preprocessing": Variant(model=PreprocessedModel, against="sparse_dist_preprocessing"),
    "tracking": Variant(beside=_tracked),
    "publishing": Variant(beside=_published),
}
"""By name. Those named `base...`, `sparse_dist...` and `semi_sync...` are TorchRec's pipelines, others ours."""

NOT_COMPARED = {
    "TorchRec's prefetch": "it trains tables behind a cache (fused_uvm_caching), another kernel than all others "
    "here, which FBGEMM has on GPUs alone"
}
"""Why there are pipelines of TorchRec's that are no variant."""


def with_references(names: Collection[str]) -> dict[str, Variant]:
    """The variants of these names, and those that they are compared with; all variants, if there are no names."""
    wanted = set(names or VARIANTS)
    for name in list(wanted):
        while against := VARIANTS[name].against:
            wanted.add(name := against)
    return {name: variant for name, variant in VARIANTS.items() if name in wanted}


def trainable(variants: Mapping[str, Variant], device: torch.device) -> tuple[dict[str, Variant], dict[str, str]]:
    """Those that can train on a device, and why the others cannot."""
    problems = {
        name: variant.not_on_cpu
        for name, variant in variants.items()
        if device.type == "cpu" and variant.not_on_cpu
    }
    return {name: variant for name, variant in variants.items() if name not in problems}, problems
