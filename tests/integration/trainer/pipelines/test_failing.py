"""Batches of a lone rank that fail after their forward has used up what was sent out ahead."""

from typing import Any
from unittest import mock

import pytest
import torch
from tests.integration.trainer.pipelines.comparison import check_same
from tests.integration.trainer.pipelines.scenarios.failing import BackwardMayFail, failed_at, without
from tests.integration.trainer.pipelines.training import Regression, Training, batches, through

pytestmark = [pytest.mark.usefixtures("lone_rank"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("options", [{}, {"grad_accum": 2}, {"grad_accum": 2, "accumulate_tables": True}])
def test_a_batch_whose_backward_fails_is_left_out(options: dict[str, Any]) -> None:
    expected, training = (Training(BackwardMayFail()) for _ in range(2))
    pipeline, stream = training.pipeline(**options), batches(7)
    outputs, error = failed_at(2, pipeline, stream)
    assert "the batch after 2 others is left out" in error.__notes__[0]
    assert outputs + through(pipeline, stream) == expected.pipelined(without(2), **options)
    assert pipeline.trained == 6
    check_same(training.held(), expected.held())


def test_training_goes_on_after_an_optimizer_step_that_fails() -> None:
    training, stream = Training(Regression()), batches(5)
    pipeline = training.pipeline(enable_amp=True, amp_dtype=torch.float16, loss_scale=2)
    with mock.patch.object(training.optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
        pipeline.progress(stream)
    assert len(through(pipeline, stream)) == 4
