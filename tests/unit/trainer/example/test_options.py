"""Options that become flags, and flags that give another process the same options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.trainer.example.options import ModelOptions, StreamOptions, arguments, flags


def parsed(words: Sequence[str]) -> list[Any]:
    found = list[Any]()

    @click.command()
    @flags(StreamOptions, "stream")
    @flags(ModelOptions, "sizes")
    def command(**options: object) -> None:
        found.extend(options[name] for name in ("stream", "sizes"))

    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found


def test_defaults_are_those_of_the_classes() -> None:
    assert parsed([]) == [StreamOptions(), ModelOptions()]


@pytest.mark.parametrize("managed", [False, True])
def test_arguments_pass_the_same_options_to_another_process(managed: bool, tmp_path: Path) -> None:
    stream = StreamOptions(
        data="ratings:some file", events=77, events_per_second=12.5, batch_size=6, start_file=tmp_path / "start"
    )
    sizes = ModelOptions(users=11, items=12, cross_buckets=13, dim=4, hidden=6, managed=managed)
    assert parsed(arguments(stream, sizes)) == [stream, sizes]


def test_a_wrong_value_is_a_wrong_use() -> None:
    @click.command()
    @flags(ModelOptions, "sizes")
    def command(sizes: ModelOptions) -> None:
        pytest.fail(str(sizes))

    refused = CliRunner().invoke(command, ["--dim", "5"])
    assert refused.exit_code == 2
    assert "dim: 5, expected an even number" in refused.output
