"""The options of how the click model is trained."""

import click
import pytest
import torch
from click.testing import CliRunner

from deltasync.trainer.clicks.training_options import (
    TrainingOptions,
    take_training_options,
    training_options,
    why_not_shared,
)


def _parse(arguments: list[str]) -> TrainingOptions:
    found = []

    @click.command()
    @training_options
    def command(**settings: object) -> None:
        found.append(take_training_options(settings))
        assert not settings

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(
    "options",
    [
        TrainingOptions(),
        TrainingOptions(grad_accum=4, amp=True, input="tensordict"),
        TrainingOptions(grad_accum=2, accumulate_tables=True),
    ],
)
def test_arguments_say_the_same_to_another_process(options: TrainingOptions) -> None:
    assert _parse(options.arguments()) == options


def test_the_pipeline_is_asked_for_the_same() -> None:
    pipeline = TrainingOptions(grad_accum=4, accumulate_tables=True, amp=True).pipeline
    assert (pipeline.grad_accum, pipeline.accumulate_tables) == (4, True)
    assert (pipeline.enable_amp, pipeline.amp_dtype) == (True, torch.bfloat16)


@pytest.mark.parametrize(("batch_size", "ranks", "grad_accum", "shared"), [
    (128, 2, 4, True), (12, 2, 3, True), (12, 2, 4, False), (10, 4, 1, False),
])  # fmt: skip
def test_micro_batches_share_a_batch_evenly(batch_size: int, ranks: int, grad_accum: int, shared: bool) -> None:
    reason = why_not_shared(batch_size, ranks, TrainingOptions(grad_accum=grad_accum))
    assert (reason == "") == shared
    assert shared or f"multiple of {ranks * grad_accum}" in reason
