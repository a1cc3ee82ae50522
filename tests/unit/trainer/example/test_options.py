"""Options that become flags, and flags that give another process the same options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from deltasync.base.errors import InvalidInput
from deltasync.trainer.example.options import ModelOptions, StreamOptions, TrainingOptions, arguments, flags


def parsed(words: Sequence[str]) -> list[Any]:
    found = list[Any]()

    @click.command()
    @flags(StreamOptions, "stream")
    @flags(ModelOptions, "sizes")
    @flags(TrainingOptions, "training")
    def command(**options: object) -> None:
        found.extend(options[name] for name in ("stream", "sizes", "training"))

    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found


def test_defaults_are_those_of_the_classes() -> None:
    assert parsed([]) == [StreamOptions(), ModelOptions(), TrainingOptions()]


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize(
    "training",
    [TrainingOptions(grad_accum=4, amp=True, input="tensordict"), TrainingOptions()],
)
def test_arguments_tell_another_process_the_same(managed: bool, training: TrainingOptions, tmp_path: Path) -> None:
    stream = StreamOptions(
        data="ratings:some file", events=77, events_per_second=12.5, batch_size=6, start_file=tmp_path / "start"
    )
    sizes = ModelOptions(users=11, items=12, cross_buckets=13, dim=4, hidden=6, managed=managed)
    assert parsed(arguments(stream, sizes, training)) == [stream, sizes, training]


def test_only_some_fields_may_have_a_flag() -> None:
    @click.command()
    @flags(StreamOptions, "stream", ("events",))
    def command(stream: StreamOptions) -> None:
        assert stream == StreamOptions(events=5)

    assert CliRunner().invoke(command, ["--events", "5"], catch_exceptions=False).exit_code == 0
    assert CliRunner().invoke(command, ["--batch-size", "5"]).exit_code == 2


def test_a_wrong_value_is_a_wrong_use() -> None:
    @click.command()
    @flags(ModelOptions, "sizes")
    def command(sizes: ModelOptions) -> None:
        pytest.fail(str(sizes))

    refused = CliRunner().invoke(command, ["--dim", "5"])
    assert refused.exit_code == 2
    assert "dim: 5, expected an even number" in refused.output


@pytest.mark.parametrize(("field", "value"), [("users", 1), ("dim", 0), ("hidden", 1), ("dim", 5)])
def test_a_wrong_size_names_the_field(field: str, value: int) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInput, match=f"{field}: {value}"):
        ModelOptions(**options)


def test_the_pipeline_is_asked_for_the_same() -> None:
    pipeline = TrainingOptions(grad_accum=4, amp=True).pipeline
    assert pipeline.grad_accum == 4
    assert (pipeline.enable_amp, pipeline.amp_dtype) == (True, torch.bfloat16)


def test_micro_batches_share_a_batch_evenly() -> None:
    TrainingOptions(grad_accum=4).check_shares(128, ranks=2)
    TrainingOptions(grad_accum=3).check_shares(12, ranks=2)
    with pytest.raises(InvalidInput, match="batch_size: 12, expected a multiple of 8, for 2 ranks with 4"):
        TrainingOptions(grad_accum=4).check_shares(12, ranks=2)
    with pytest.raises(InvalidInput, match="batch_size: 10, expected a multiple of 4, for 4 ranks"):
        TrainingOptions().check_shares(10, ranks=4)
