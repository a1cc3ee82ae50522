"""The ways to train that the pipeline benchmark compares."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist

from deltasync.trainer.bench.pipelines.model import BagModel, PreprocessedModel, TensorDictModel
from deltasync.trainer.bench.pipelines.options import GRAD_ACCUM
from deltasync.trainer.bench.tracker_reads import tracked
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.sync import DeltaSync, SyncOptions


class Pipeline(Protocol):
    """What all pipelines can do."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> torch.Tensor:
        """Train on the next batch; its loss."""


@dataclass(frozen=True)
class VariantContext:
    """What a variant needs beside its model.

    Attributes:
        service: where to publish.
        cut_every: steps from one cut, or read of a tracker, to the next.
    """

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
        tensordicts: batches are TensorDicts.
        against: the variant whose step time this one's is compared with.
    """

    pipeline: Callable[..., Pipeline] = _ours
    model: type[BagModel] = BagModel
    beside: Callable[[nn.Module, VariantContext], AbstractContextManager[_Step]] = _alone
    tensordicts: bool = False
    against: str | None = "ours"


VARIANTS = {
    "base": Variant(TrainPipelineBase, against="sparse_dist"),
    "sparse_dist": Variant(TrainPipelineSparseDist, against=None),
    "ours": Variant(against="sparse_dist"),
    "tensordict": Variant(model=TensorDictModel, tensordicts=True),
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
"""By name. Those named `sparse_dist...` are TorchRec's pipelines, as is `base`; all others are ours."""


def with_references(names: Collection[str]) -> dict[str, Variant]:
    """The variants of these names, and those that they are compared with; all variants, if there are no names."""
    wanted = set(names or VARIANTS)
    for name in list(wanted):
        while against := VARIANTS[name].against:
            wanted.add(name := against)
    return {name: variant for name, variant in VARIANTS.items() if name in wanted}
