"""`python -m tests.bench apply` and `python -m tests.bench pause`, small: the figures are of the work they tell of."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.bench.__main__ import bench
from tests.bench.pause import _longest

pytestmark = pytest.mark.nightly


def figures_of(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    found = folder / "figures.json"
    done = CliRunner().invoke(bench, [*arguments, "--json", str(found)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(found.read_text()), done.output


def assert_has_range(figures: dict[str, Any], name: str) -> None:
    assert 0 < figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]


def test_time_to_apply_is_given_as_ratios_with_their_range(tmp_path: Path) -> None:
    figures, said = figures_of(
        tmp_path, "apply", "--rows", "500", "--changed", "100", "--dim", "8", "--rounds", "3"
    )
    assert [figures[name] for name in ("rows", "changed", "dim", "rounds")] == [500, 100, 8, 3]
    for name in ("apply_time_ratio", "given_time_ratio", "replica_time_ratio"):
        assert_has_range(figures, name)
    assert "aim: at most 1.0" in said


def test_pauses_are_of_both_ways_of_reading_and_the_worse_one_counts(tmp_path: Path) -> None:
    arguments = ("--rows", "9000", "--changed", "5000", "--dim", "8", "--releases", "20", "--rounds", "2")
    figures, said = figures_of(tmp_path, "pause", *arguments)
    assert [figures[name] for name in ("rows", "changed", "dim", "releases", "rounds")] == [9000, 5000, 8, 20, 2]
    both = [figures[f"{way}_pause_ratio"] for way in ("pause", "copies")]
    assert figures["pause_ratio"] == max(both)
    assert_has_range(figures, "pause_pause_ratio")
    assert_has_range(figures, "copies_pause_ratio")
    assert "aim: at most 1.5" in said


def test_the_pause_of_a_release_is_the_longest_wait_that_it_overlaps() -> None:
    waits = [(0.0, 0.5), (1.0, 1.25), (2.0, 4.0), (4.5, 4.6), (7.0, 8.0)]
    applied = [(0.25, 0.3), (0.6, 0.9), (1.2, 3.0), (3.9, 4.55), (5.0, 6.0), (6.0, 7.5)]
    assert _longest(waits, applied) == pytest.approx([0.5, 0.0, 2.0, 2.0, 0.0, 1.0])


@pytest.mark.parametrize("name", ["apply", "pause"])
def test_sizes_have_bounds(name: str) -> None:
    refused = CliRunner().invoke(bench, [name, "--rows", "0"])
    assert refused.exit_code == 2
    assert "--rows" in refused.output
