"""`python -m tests.bench pipelines`, small: all pipelines do their work, and the figures are of that work."""

import json
import sys
from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner
from tests.bench.__main__ import bench
from tests.bench.pipelines.options import Sizes
from tests.support.programs import run_program

SMALL = Sizes(ranks=2, batch_size=8, tables=5, rows=40, dim=8, ids=2, dense=3, over=8, steps=4, rounds=2)
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = tmp_path_factory.mktemp("bench") / "pipelines.json"
    done = run_program(sys.executable, "-m", "tests.bench", "pipelines", *SMALL.arguments(), "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def test_ratios_are_medians_with_their_range(figures: dict[str, Any]) -> None:
    assert figures["device"] == "cpu"
    for name in ("pipeline", "tensordict"):
        low, ratio, high = (figures[f"{name}_step_ratio{end}"] for end in ("_low", "", "_high"))
        assert 0 < low <= ratio <= high, name


def test_all_pipelines_train_alike(figures: dict[str, Any]) -> None:
    assert list(figures["variants"]) == ["torchrec", "ours", "tensordict"]
    assert len({line["loss"] for line in figures["variants"].values()}) == 1


@cache
def help_of(name: str) -> str:
    return CliRunner().invoke(bench, [name, "--help"]).output


def test_sizes_are_of_the_one_bench_that_has_them() -> None:
    names = CliRunner().invoke(bench, ["--list"]).output.split()
    assert {"publish", "tracker", "pipelines", "failover"} <= set(names)
    assert all("--json" in help_of(name) for name in names)
    assert [name for name in names if "--batch-size" in help_of(name)] == ["pipelines"]
