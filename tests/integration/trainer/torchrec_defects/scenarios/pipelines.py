"""Rows 2 and 25: copies built from deltas, under pipelines that look up ahead and with gradients accumulated."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.integration.trainer.torchrec_defects.copies import Copy, changed, weights
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    CPU,
    ROWS,
    bags,
    lookups,
    sequences,
    sharded,
)
from tests.integration.trainer.torchrec_defects.registry import scenario
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.sharding_plan import data_parallel, row_wise
from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

STEPS = 12
MICRO_BATCHES = 3
FEATURES = ("rows", "whole", "copies", "unfused", "s")
OPTIONS = TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True)


@contextmanager
def streams_of_a_cpu() -> Iterator[None]:
    """These pipelines run on a GPU; on a CPU, which has no streams, nothing needs to be recorded on them."""
    with ExitStack() as patches:
        for kind in (KeyedJaggedTensor, torch.Tensor):
            patches.enter_context(patch.object(kind, "record_stream", lambda *_: None))
        patches.enter_context(patch.object(torch, "get_device_module", lambda *_: torch.cpu))
        # TorchRec 1.9 asks a stream for its device.
        patches.enter_context(patch.object(torch.cpu.Stream, "device", torch.device("cpu"), create=True))
        yield


def model_and_optimizer() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Tables of several kinds; momentum moves rows of the last two that nobody looks up."""
    by_rows = row_wise(compute_kernel="fused")
    model = sharded(
        {"bags": bags("rows", "whole", "copies", "unfused"), "sequences": sequences("s")},
        {
            "rows": by_rows,
            "s": by_rows,
            "copies": data_parallel(),
            "unfused": row_wise(compute_kernel="dense"),
        },
        dense=True,
    )
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def batches(number: int) -> Iterator[KeyedJaggedTensor]:
    """Few ids in each, so that a row is rarely changed again soon."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(number):
        ids = torch.randint(ROWS, (len(FEATURES), 2), generator=generator).tolist()
        yield lookups(**dict(zip(FEATURES, ids, strict=True)))


def _train(kind: type[TrainPipelineSparseDist], every: int) -> None:
    model, optimizer = model_and_optimizer()
    tracker = Tracker(model, OPTIONS)
    copy = Copy(model, tracker)
    copy.update()
    pipeline = kind(model, optimizer, CPU)
    source = batches(STEPS)
    before = weights(model)
    for step in range(1, STEPS + 1):
        pipeline.progress(source)
        tracker.step()
        if step % every == 0:
            assert copy.update() == changed(model, before)
            copy.check(model)
            before = weights(model)


@scenario(row=2, ranks=2)
def nothing_is_lost_under_the_fused_pipeline() -> None:
    with streams_of_a_cpu():
        for every in (1, 4):
            _train(TrainPipelineFusedSparseDist, every)


@scenario(row=2, ranks=2)
def nothing_is_lost_under_the_semi_synchronous_pipeline() -> None:
    with streams_of_a_cpu():
        for every in (1, 4):
            _train(TrainPipelineSemiSync, every)


@scenario(row=25, ranks=2)
def reads_between_micro_batches_miss_nothing() -> None:
    model, optimizer = model_and_optimizer()
    tracker = Tracker(model, OPTIONS)
    copy = Copy(model, tracker)
    copy.update()
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    accumulating = GradientAccumulationWrapper(
        pipeline, optimizer, model, GradientAccumulationConfig(is_enabled=True, num_steps=MICRO_BATCHES)
    )
    for micro_batch, batch in enumerate(batches(STEPS), 1):
        before = weights(model)
        accumulating.progress(iter([batch]))
        if micro_batch % MICRO_BATCHES == 0:
            tracker.step()
        reported = copy.update()
        assert reported == changed(model, before)
        for fqn in (f"{BAGS}.copies", f"{BAGS}.unfused", "dense.weight"):
            assert (fqn in reported) == (micro_batch % MICRO_BATCHES == 0)
        copy.check(model)
