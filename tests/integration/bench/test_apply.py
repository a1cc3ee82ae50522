"""`python -m tests.bench apply`, small: the figures are of the work they tell of."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.bench.__main__ import bench

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


def test_sizes_have_bounds() -> None:
    refused = CliRunner().invoke(bench, ["apply", "--rows", "0"])
    assert refused.exit_code == 2
    assert "--rows" in refused.output
