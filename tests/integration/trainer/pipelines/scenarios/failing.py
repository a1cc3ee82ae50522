"""Batches that fail after their forward has used up what was sent out ahead: in backward, or in the step."""

from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.comparison import check_same
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Regression, Training, batches, through

from deltasync.base.errors import Contradiction


class FailsInBackward(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if FailsInBackward.fails:
            FailsInBackward.fails = False
            raise torch.OutOfMemoryError("no memory")
        return gradient


class BackwardMayFail(Regression):
    """After gradients of other parameters are there, and before it changes a table."""

    def looked_up(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = FailsInBackward.apply(super().looked_up(batch))  # type: ignore[no-untyped-call]
        return found


def failed_at(place: int, pipeline: Any, stream: Any) -> tuple[list[Any], BaseException]:
    """The outputs before a batch, and what `progress` raises there."""
    outputs = [pipeline.progress(stream) for _ in range(place)]
    FailsInBackward.fails = True
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as failed:
        pipeline.progress(stream)
    return outputs, failed.value


def without(*places: int) -> list[Any]:
    return [batch for place, batch in enumerate(batches(7)) if place not in places]


@SCENARIOS.scenario("failing", ranks=2)
def training_goes_on_after_a_failed_backward_when_told_to() -> None:
    """Ranks may have failed at different places, and wait for each other."""
    expected, training = (Training(BackwardMayFail(), BOTH_RANKS) for _ in range(2))
    pipeline, stream = training.pipeline(), batches(7)
    outputs, _ = failed_at(2, pipeline, stream)
    for _ in range(2):
        with pytest.raises(
            Contradiction, match=r"after 2 others has failed .* OutOfMemoryError: no memory;.*the 2 in"
        ):
            pipeline.progress(stream)
    pipeline.reset()
    assert outputs + through(pipeline, stream) == expected.pipelined(without(2, 3, 4))
    check_same(training.held(), expected.held())
