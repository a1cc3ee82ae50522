"""The options that every process of a stream shares."""

import math
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.trainer.clicks.model_options import ModelOptions
from deltasync.trainer.clicks.stream_options import (
    StreamOptions,
    managed_option,
    stream_options,
    take_stream_options,
)


def _parse(arguments: list[str]) -> StreamOptions:
    found = []

    @click.command()
    @stream_options
    @managed_option
    def command(**settings: object) -> None:
        found.append(take_stream_options(settings))
        assert not settings

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize("managed", [False, True])
def test_arguments_say_the_same_to_another_process(managed: bool, tmp_path: Path) -> None:
    options = StreamOptions(
        data="ratings:some file",
        events=77,
        events_per_second=12.5,
        batch_size=6,
        seed=9,
        start_file=tmp_path / "start",
        model=ModelOptions(users=11, items=12, cross_buckets=13, dim=4, hidden=5, managed=managed),
    )
    assert _parse(options.arguments()) == options


def test_the_first_event_arrives_at_the_time_in_the_start_file(tmp_path: Path) -> None:
    start = tmp_path / "start"
    options = _parse(
        ["--events", "64", "--batch-size", "32", "--start-file", str(start), "--events-per-second", "1e9"]
    )
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        start.write_text(str(time.time() - 1))

    assert [len(events) for events in options.batches(options.pace(sleep), sleep)] == [32, 32]
    assert len(waited) == 1
    assert math.isfinite(waited[0])


@pytest.mark.parametrize(("field", "value"), [("users", 1), ("dim", 0), ("hidden", 1), ("dim", 5)])
def test_a_wrong_size_names_the_field(field: str, value: int) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field}: {value}"):
        ModelOptions(**options)
