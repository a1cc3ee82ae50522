"""What a run leaves behind and shows."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.trainer.clicks.outputs import Outputs, output_options, take_outputs


def outputs_of(*arguments: str) -> Outputs:
    found: list[Outputs] = []

    @click.command()
    @output_options
    def command(**settings: Any) -> None:
        found.append(take_outputs(settings))

    CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    return found[0]


def test_options_left_out_are_the_defaults() -> None:
    assert outputs_of() == Outputs()


def test_scalars_and_lag_are_asked_for_by_options() -> None:
    outputs = outputs_of("--tensorboard", "runs", "--tensorboard-lag", "a", "--tensorboard-lag", "b")
    assert outputs == Outputs(tensorboard=Path("runs"), tensorboard_lag=("a", "b"))


def test_lag_without_a_folder_is_a_wrong_use() -> None:
    with pytest.raises(click.UsageError, match="--tensorboard-lag: give --tensorboard too"):
        outputs_of("--tensorboard-lag", "a")


def test_nothing_is_sampled_for_nobody() -> None:
    nobody: Any = None
    with Outputs().scalars(nobody, 0, "localhost:50051") as scalars:
        assert scalars is None
