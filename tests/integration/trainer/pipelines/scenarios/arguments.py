"""Arguments of TorchRec's pipelines that are taken; tests/unit/trainer/pipelines shows which are not, and why."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.comparison import check_same, told
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import (
    BOTH_RANKS,
    Paused,
    Regression,
    Training,
    batches,
    through,
)
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper

from deltasync.base.errors import Contradiction

scenario = SCENARIOS.scenario("arguments", ranks=2)


class Predicts(Regression):
    """Returns what it predicts, without a loss."""

    def forward(self, batch: Any) -> Any:
        return self.over(torch.cat([self.looked_up(batch), batch.dense], dim=1)).squeeze(1)


class Squared(nn.Module):
    """The model with a loss."""

    def __init__(self, model: nn.Module, wrap: Any = lambda batch: batch) -> None:
        super().__init__()
        self.model, self._wrap = model, wrap

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = nn.functional.mse_loss(self.model(self._wrap(batch)), batch.label)
        return loss, loss.detach()


@scenario
def another_forward_than_the_model_s() -> None:
    plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Predicts(), BOTH_RANKS)
    with told() as reasons:
        outputs = pipelined.pipelined(batches(5), custom_model_fwd=Squared(pipelined.model))
    assert outputs == plain.plainly(batches(5))
    check_same(pipelined.held(), plain.held())
    assert reasons == {}


@scenario
def a_batch_is_taken_after_forward() -> None:
    class Notes(Regression):
        """How many batches were taken when its forward runs."""

        def __init__(self) -> None:
            super().__init__()
            self.stream, self.taken = Paused(batches(5), 5, ends=True), list[int]()

        def forward(self, batch: Any) -> Any:
            self.taken.append(self.stream.taken)
            return super().forward(batch)

    for after, taken in (False, [3, 4, 5, 5, 5]), (True, [2, 3, 4, 5, 5]):
        plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Notes(), BOTH_RANKS)
        pipeline, notes = pipelined.pipeline(enqueue_batch_after_forward=after), pipelined.model.module
        assert through(pipeline, notes.stream) == plain.plainly(batches(5))
        assert notes.taken[-5:] == taken  # It is traced before.
        pipeline.detach()
        check_same(pipelined.held(), plain.held())


class Averages(DMPCollection):  # type: ignore[misc]  # torchrec's types are not followed
    """Notes after how many batches it is to average; DMPCollections themselves are for GPUs."""

    __init__ = DistributedModelParallel.__init__

    def sync(self, include_optimizer_state: bool = True) -> None:
        self.averaged.append(self.pipeline.trained + 1)


@scenario
def replicas_are_averaged_after_the_same_batches_on_all_ranks() -> None:
    options: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [1, 2, 3, 4, 5]),
        ({"dmp_collection_sync_interval_batches": 2}, [1, 3, 5]),
        ({"dmp_collection_sync_interval_batches": None}, []),
    ]
    for of_pipeline, averaged in options:
        training = Training(Regression(), BOTH_RANKS)
        training.model.__class__ = Averages
        pipeline = training.pipeline(**of_pipeline)
        training.model.averaged, training.model.pipeline = [], pipeline
        stream = Paused(batches(5), 0, ends=False)
        for stream.arrived in (0, 1, 4, 5):
            for _ in range(1 + dist.get_rank()):  # One rank asks more often whether there is another batch.
                through(pipeline, stream)
        assert training.model.averaged == averaged


@scenario
def a_wrapper_that_accumulates_gradients_is_refused() -> None:
    training = Training(Regression(), BOTH_RANKS)
    pipeline = training.pipeline()
    config = GradientAccumulationConfig(num_steps=2)
    wrapped = GradientAccumulationWrapper(pipeline, training.optimizer, training.model, config)
    with pytest.raises(Contradiction, match=r"OnlinePipeline accumulates gradients itself; use grad_accum"):
        wrapped.progress(batches(2))
