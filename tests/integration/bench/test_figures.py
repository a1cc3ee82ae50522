"""`python -m tests.bench NAME`, small: the figures are of the work they tell of."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.bench import quality as bench_quality
from tests.bench.__main__ import bench
from tests.bench.consumers import EIGHT
from tests.bench.process import TICK_SECONDS, cpu_seconds
from tests.bench.scale import uniform, zipf
from tests.bench.serve import WAYS
from tests.bench.timing import spread_of
from tests.support.programs import run_program

from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.core.value_types import ValueType

KINDS = {"fp32": 4 * 8, "fp16": 2 * 8, "bf16": 2 * 8, "int8": 8 + 8, "int8-tbe": 8 + 4, "int4-tbe": 4 + 4}
ID_BYTES = 8
Measured = tuple[dict[str, Any], str]


def measured(folder: Path, name: str, *arguments: str) -> Measured:
    """The figures of a benchmark, and what it printed."""
    found = folder / "figures.json"
    done = run_program(sys.executable, "-m", "tests.bench", name, *arguments, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return json.loads(found.read_text()), done.stdout


def assert_has_range(figures: dict[str, Any], name: str) -> None:
    assert 0 < figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("release")
    return measured(folder, "release", "--rows", "5000", "--dim", "8", "--rounds", "3")


@pytest.fixture(scope="module")
def consumers(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("consumers")
    return measured(folder, "consumers", "--rows", "400", "--dim", "8", "--rounds", "2")


@pytest.mark.nightly
def test_a_measured_release_takes_a_tenth_of_rows_that_are_all_dirty(release: Measured) -> None:
    figures, _ = release
    assert (figures["rows"], figures["dim"], figures["rounds"]) == (5000, 8, 3)
    assert figures["table_rows"] > figures["rows"]
    assert {name: line["released_rows"] for name, line in figures["value_types"].items()} == dict.fromkeys(
        KINDS, 500
    )
    # A few of those that have changed are the same codes of 4 bits.
    dirty = {name: line["dirty_rows"] for name, line in figures["value_types"].items()}
    assert 4950 <= dirty.pop("int4-tbe") <= 5000
    assert set(dirty.values()) == {5000}
    for name, row_bytes in KINDS.items():
        assert figures["value_types"][name]["released_bytes"] == 500 * (ID_BYTES + row_bytes), name


@pytest.mark.nightly
def test_release_time_is_given_as_ratios_with_their_range(release: Measured) -> None:
    figures, said = release
    for line in (figures["value_types"][name] for name in KINDS):
        assert_has_range(line, "time_ratio")
    assert figures["release_time_ratio"] == figures["value_types"]["fp32"]["time_ratio"]
    assert all(name in said for name in KINDS)


@pytest.mark.nightly
def test_the_eight_policies_differ_and_cover_what_a_policy_can_say() -> None:
    policies = list(EIGHT.values())
    assert len(policies) == 8
    assert len(set(policies)) == 8
    assert {policy.value_type for policy in policies} == set(ValueType)
    for field, default in Policy().as_dict().items():
        assert any(policy.as_dict()[field] != default for policy in policies), field


@pytest.mark.nightly
def test_every_consumer_is_given_rows_of_every_version(consumers: Measured) -> None:
    figures, said = consumers
    assert set(figures["consumers"]) == set(EIGHT)
    assert figures["versions"] > 0
    assert all(given["releases"] >= figures["versions"] for given in figures["consumers"].values())
    assert_has_range(figures, "eight_ratio")
    assert "aim: at most 3" in said


@pytest.mark.nightly
def test_a_process_is_charged_for_the_time_it_computes() -> None:
    before = cpu_seconds(os.getpid())
    while (taken := cpu_seconds(os.getpid()) - before) < 3 * TICK_SECONDS:
        sum(range(10_000))
    assert sum(os.times()[:2]) >= before + taken - TICK_SECONDS


@pytest.mark.nightly
def test_a_spread_has_its_median_between_its_ends() -> None:
    assert spread_of("time", [3.0, 1.0, 2.0]) == {"time": 2.0, "time_low": 1.0, "time_high": 3.0}
    assert spread_of("time", range(101)) == {"time": 50, "time_low": 40, "time_high": 60}


@pytest.mark.nightly
def test_time_to_apply_is_given_as_ratios_with_their_range(tmp_path: Path) -> None:
    figures, said = measured(tmp_path, "apply", "--rows", "500", "--changed", "100", "--dim", "8", "--rounds", "3")
    assert [figures[name] for name in ("rows", "changed", "dim", "rounds")] == [500, 100, 8, 3]
    for name in ("apply_time_ratio", "replica_time_ratio"):
        assert_has_range(figures, name)
    assert "aim: at most 0.8" in said


@pytest.mark.nightly
def test_the_path_is_measured_beside_a_bare_one(tmp_path: Path) -> None:
    figures, said = measured(tmp_path, "publish", "--rows", "2000", "--rounds", "2")
    assert [figures[name] for name in ("rows", "rounds")] == [2000, 2]
    for name in ("path_ratio", "throughput_ratio"):
        assert_has_range(figures, name)
    assert figures["service_cpu_ratio"] >= 0  # Of rows this few it is a matter of luck.
    assert "bare path" in said


@pytest.mark.nightly
def test_an_owner_is_killed_and_a_model_moved(tmp_path: Path) -> None:
    figures, _ = measured(tmp_path, "failover", "--rounds", "1")
    assert figures["takeover_seconds"] > 0
    assert figures["move_held_seconds"] >= figures["move_seconds"] > 0


@pytest.mark.nightly
def test_each_policy_has_its_quality_and_its_bytes(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    sizes = ("--events", "2560", "--events-per-second", "400", "--plot", str(plot))
    figures = measured(tmp_path, "quality", *sizes)[0]["synthetic"]
    lines = {line["policy"]: line for line in figures["lines"]}
    assert list(lines) == [bench_quality.TITLES[fleet.consumer] for fleet in bench_quality.FLEETS]
    assert figures["events_evaluated"] == 1280
    assert all(0 < line["auc"] < 1 for line in lines.values())
    sent = {name: line["bytes"] for name, line in lines.items()}
    assert sent["top 1 % int8"] < sent["top 10 % int8"] < sent["full int8"] < sent["full fp32"]
    assert sent["full fp32"] < figures["full_push_bytes"]
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.nightly
def test_a_restart_publishes_the_rows_that_came_after_and_its_own(tmp_path: Path) -> None:
    figures, _ = measured(tmp_path, "restart", "--rows", "50000")
    assert figures["resent_ratio"] == figures["resent_bytes"] / figures["lost_bytes"]
    assert figures["lost_bytes"] <= figures["resent_bytes"] <= figures["lost_bytes"] + figures["own_bytes"]
    assert figures["resent_bytes"] < figures["everything_bytes"] == 50_000 * (8 + 64)


@pytest.mark.nightly
def test_checkpoints_are_written_while_cuts_are_timed_and_loaded(tmp_path: Path) -> None:
    sizes = ("--rows", "20000", "--dim", "8", "--cut-rows", "100", "--rounds", "2", "--load-gb", "0.01")
    figures, said = measured(tmp_path, "checkpoint", *sizes)
    assert [figures[name] for name in ("rows", "dim", "cut_rows", "rounds")] == [20_000, 8, 100, 2]
    for name in ("cut_ratio", "load_ratio", "load_cold_ratio"):
        assert_has_range(figures, name)
    assert figures["changed_bytes"] == 5 * 20_000 * (8 + 4 * 8)
    assert figures["write_ratio"] == figures["written_bytes"] / figures["changed_bytes"]
    assert figures["checkpoints"] == 50
    assert 0.009 < figures["load_gb"] < 0.011
    assert "write_ratio" in said


@pytest.mark.nightly
def test_a_rollback_is_measured_and_cuts_while_a_version_is_kept(tmp_path: Path) -> None:
    sizes = ("--rows", "5000", "--dim", "8", "--cut-rows", "100", "--every", "0.5", "--rounds", "2")
    figures, said = measured(tmp_path, "versions", *sizes)
    for way in ("follow", "model"):
        assert figures[f"{way}_ratios"] == {"everything": 1.0, "topk-int8": 1.0}
    assert figures["rollback_ratio"] == 1.0
    for name in ("cut_ratio", "mean_cut_ratio"):
        assert_has_range(figures, name)
        assert name in said
    assert 0 < figures["kept_cut_seconds"] <= figures["kept_cut_p99_seconds"]
    assert figures["keep_seconds"] > 0
    assert figures["cuts_meanwhile"] > 0


@pytest.mark.nightly
def test_every_way_of_reading_is_measured_with_rows_replaced(tmp_path: Path) -> None:
    sizes = ("--rows", "2000", "--dim", "8", "--rounds", "2", "--seconds", "0.3", "--releases-per-second", "50")
    figures, said = measured(tmp_path, "serve", *sizes)
    for way in WAYS:
        assert way in said
        assert figures[f"{way}_replaced_rows_per_second"] > 0
        for name in ("lookup_ratio", "p99_ratio"):
            assert_has_range(figures, f"{way}_{name}")
    assert figures["default"] in WAYS
    for name in ("lookup_ratio", "p99_ratio", "lookups_per_second"):
        assert figures[name] == figures[f"{figures['default']}_{name}"]


@pytest.mark.nightly
def test_workers_over_a_mirror_are_measured_with_rows_that_change(tmp_path: Path) -> None:
    sizes = ("--rows", "20000", "--dim", "64", "--rounds", "2", "--seconds", "0.3", "--workers", "2")
    figures, said = measured(tmp_path, "shared", *sizes)
    for name in ("lookup_ratio", "p99_ratio", "apply_ratio"):
        assert_has_range(figures, name)
    assert figures["changed_rows_per_second"] > 0
    assert 1 < figures["memory_ratio"] < figures["workers"], "another worker has more memory, but no copy"
    assert figures["copies_ratio"] > 2, "two sides"
    assert figures["private_ratio"] > 2, "a copy for each of two workers"
    assert "copies with both sides" in said


@pytest.mark.nightly
def test_the_cost_of_a_cut_is_told_by_the_size_of_the_table(tmp_path: Path) -> None:
    sizes = ("--rows", "4000", "--small-rows", "1000", "--cut-rows", "100", "--rounds", "3")
    figures, _ = measured(tmp_path, "scale", *sizes)
    ratios = figures["policies"]
    assert [*ratios] == ["everything", "top-k 10 %"]
    assert all([*kinds] == ["uniform", "zipf"] for kinds in ratios.values())
    worst = {name: max(each["ratio"] for each in kinds.values()) for name, kinds in ratios.items()}
    assert worst == {"everything": figures["scale_ratio"], "top-k 10 %": figures["scale_topk_ratio"]}
    lags = (each["lag_ratio"] for kinds in ratios.values() for each in kinds.values())
    assert figures["scale_lag_ratio"] == max(lags)


@pytest.mark.parametrize("kind", [uniform, zipf])
def test_as_many_different_rows_are_drawn_as_asked_for(
    kind: Callable[[np.random.Generator, int, int], Ids],
) -> None:
    for rows, count in ((1_000, 1_000), (1_000_000, 10_000)):
        ids = kind(np.random.default_rng(0), rows, count)
        assert len(ids) == count
        assert ids.dtype == np.int64
        assert ids[0] >= 0
        assert ids[-1] < rows
        assert np.all(np.diff(ids) > 0)


def test_by_zipf_the_same_rows_are_drawn_again_and_again() -> None:
    def again(kind: Callable[[np.random.Generator, int, int], Ids]) -> int:
        generator = np.random.default_rng(0)
        return len(np.intersect1d(kind(generator, 1_000_000, 10_000), kind(generator, 1_000_000, 10_000)))

    assert again(zipf) > 10 * again(uniform)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["release", "consumers", "apply"])
def test_sizes_have_bounds(name: str) -> None:
    refused = CliRunner().invoke(bench, [name, "--rows", "0"])
    assert (refused.exit_code, "--rows" in refused.output) == (2, True)
