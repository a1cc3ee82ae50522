"""`python -m tests.bench pipelines`, small: all variants do their work, and the figures are of that work."""

import json
import sys
from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner
from tests.bench.__main__ import bench
from tests.bench.pipelines.options import NAMES, Sizes
from tests.bench.pipelines.variants import NOT_COMPARED, VARIANTS, with_references
from tests.support.programs import run_program

SMALL = {
    "ranks": 2,
    "batch_size": 8,
    "tables": 5,
    "rows": 40,
    "dim": 8,
    "ids": 2,
    "dense": 3,
    "over": 8,
    "steps": 4,
    "rounds": 2,
}
ON_CPU = [name for name, variant in VARIANTS.items() if not variant.not_on_cpu]
# Those that differ in how they do it train alike on the same batches.
ALIKE = {
    (
        "base",
        "base_tensordict",
        "sparse_dist",
        "sparse_dist_tensordict",
        "ours",
        "tensordict",
        "tracking",
        "publishing",
    ),
    ("sparse_dist_preprocessing", "preprocessing"),
}
TENSORDICTS = ("tensordict", "base_tensordict", "sparse_dist_tensordict")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = tmp_path_factory.mktemp("bench") / "pipelines.json"
    sizes = Sizes(**SMALL).arguments()
    done = run_program(sys.executable, "-m", "tests.bench", "pipelines", *sizes, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(said in done.stdout for said in [*NAMES.values(), *NOT_COMPARED, "P50", "P90"])
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def test_every_variant_has_its_time_and_its_memory(figures: dict[str, Any]) -> None:
    assert figures["sizes"] == SMALL
    assert list(figures["variants"]) == ON_CPU
    for name, line in figures["variants"].items():
        assert 0 < line["step_ms_min"] <= line["step_ms"] <= line["step_ms_max"], name
        assert 0 < line["p50_ms"] <= line["p90_ms"], name
        assert line["peak_bytes"] >= line["held_bytes"], name
        assert line["against"] is None or line["against"] in NAMES


def test_what_is_not_measured_is_said_with_its_reason(figures: dict[str, Any]) -> None:
    assert figures["device"] == "cpu"
    assert [*figures["variants"], *figures["not_measured"]] == [
        *ON_CPU,
        *(name for name in NAMES if name not in ON_CPU),
        *NOT_COMPARED,
    ]
    assert all(figures["not_measured"].values())


def test_ratios_are_medians_with_their_range(figures: dict[str, Any]) -> None:
    for name in ("pipeline", *TENSORDICTS, "preprocessing", "tracking", "publishing"):
        low, ratio, high = (figures[f"{name}_step_ratio{end}"] for end in ("_low", "", "_high"))
        assert 0 < low <= ratio <= high, name


def test_variants_that_are_to_train_alike_do(figures: dict[str, Any]) -> None:
    losses = {name: line["loss"] for name, line in figures["variants"].items()}
    for names in ALIKE:
        assert len({losses[name] for name in names}) == 1, losses
    assert len({losses[name] for name in ("ours", "preprocessing", "accumulation", "accumulation_tables")}) == 4
    assert losses["amp"] != losses["ours"]


@cache
def help_of(name: str) -> str:
    return CliRunner().invoke(bench, [name, "--help"]).output


def test_sizes_are_of_the_one_bench_that_has_them() -> None:
    names = CliRunner().invoke(bench, ["--list"]).output.split()
    assert {"publish", "tracker", "pipelines", "failover"} <= set(names)
    assert all("--json" in help_of(name) for name in names)
    assert [name for name in names if "--batch-size" in help_of(name)] == ["pipelines"]


def test_a_turn_is_whole_cycles_of_accumulation() -> None:
    refused = CliRunner().invoke(bench, ["pipelines", *Sizes(**SMALL).arguments(), "--steps", "6"])
    assert refused.exit_code == 2
    assert "6 is no multiple of 4" in refused.output


def test_a_variant_brings_along_what_it_is_compared_with() -> None:
    assert list(with_references(["tensordict"])) == ["sparse_dist", "ours", "tensordict"]
    assert list(with_references(["base_tensordict"])) == ["base", "base_tensordict", "sparse_dist"]
    assert list(with_references([])) == list(VARIANTS)
