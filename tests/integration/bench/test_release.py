"""`python -m tests.bench release` and `consumers`, small: the figures are of the work they tell of."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.bench.__main__ import bench
from tests.bench.consumers import EIGHT, FLEETS, ONE
from tests.bench.process import TICK_SECONDS, cpu_seconds, resident_bytes
from tests.bench.timing import spread_of
from tests.support.programs import run_program

from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType

KINDS = {"fp32": 4 * 8, "fp16": 2 * 8, "bf16": 2 * 8, "int8": 8 + 8, "int8-tbe": 8 + 4, "int4-tbe": 4 + 4}
ID_BYTES = 8
pytestmark = pytest.mark.nightly


def figures_of(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    found = folder / "figures.json"
    done = run_program(sys.executable, "-m", "tests.bench", *arguments, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text()), done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("release")
    return figures_of(folder, "release", "--rows", "5000", "--dim", "8", "--rounds", "3")


@pytest.fixture(scope="module")
def consumers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("consumers")
    return figures_of(folder, "consumers", "--rows", "400", "--dim", "8", "--rounds", "2")


def test_a_measured_release_takes_a_tenth_of_rows_that_are_all_dirty(release: tuple[dict[str, Any], str]) -> None:
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


def test_release_time_is_given_as_ratios_with_their_range(release: tuple[dict[str, Any], str]) -> None:
    figures, said = release
    for line in (figures["value_types"][name] for name in KINDS):
        for key in ("time_ratio", "blocked_time_ratio"):
            assert 0 < line[f"{key}_low"] <= line[key] <= line[f"{key}_high"]
        assert set(line["parts"]) == {"look", "pick", "give"}
        assert all(seconds > 0 for seconds in line["parts"].values())
    assert figures["release_time_ratio"] == figures["value_types"]["fp32"]["time_ratio"]
    assert all(name in said for name in KINDS)


def test_the_eight_policies_differ_and_cover_what_a_policy_can_say() -> None:
    policies = list(EIGHT.values())
    assert len(policies) == 8
    assert len(set(policies)) == 8
    assert {policy.value_type for policy in policies} == set(ValueType)
    for field, default in Policy().as_dict().items():
        assert any(policy.as_dict()[field] != default for policy in policies), field
    assert EIGHT.items() >= ONE.items()


def test_every_consumer_is_given_rows_of_every_version(consumers: tuple[dict[str, Any], str]) -> None:
    figures, _ = consumers
    assert list(figures["fleets"]) == list(FLEETS)
    for name, line in figures["fleets"].items():
        assert set(line["consumers"]) == set(FLEETS[name])
        assert line["versions"] > 0
        # Each version is waited for, so that no two of them are one release.
        assert all(given["releases"] >= line["versions"] for given in line["consumers"].values()), name
    everything = figures["fleets"]["everything"]
    assert everything["consumers"]["everything"]["rows"] == everything["versions"] * 400 // 20


def test_consumers_cost_time_and_memory_beside_their_tables(consumers: tuple[dict[str, Any], str]) -> None:
    figures, said = consumers
    for key in ("service_cpu_per_version_ratio", "policy_cpu_per_version_ratio"):
        assert 0 < figures[f"{key}_low"] <= figures[key] <= figures[f"{key}_high"]
    lines = figures["fleets"]
    assert lines["eight"]["table_bytes"] > lines["one"]["table_bytes"] > lines["everything"]["table_bytes"] > 0
    assert all(line["rest_bytes"] > 1 << 20 for line in lines.values())
    assert "eight against one: ratio" in said


def test_a_process_is_charged_for_the_time_it_computes() -> None:
    before = cpu_seconds(os.getpid())
    while (taken := cpu_seconds(os.getpid()) - before) < 3 * TICK_SECONDS:
        sum(range(10_000))
    assert sum(os.times()[:2]) >= before + taken - TICK_SECONDS


def mapped(path: Path) -> "np.memmap[Any, np.dtype[np.uint8]]":
    path.parent.mkdir(exist_ok=True)
    array = np.memmap(path, np.uint8, "w+", shape=64 << 20)
    array[:] = 1
    return array


@pytest.mark.parametrize("name", ["table/data.mdb", "log/data.mdb"])
def test_the_log_is_no_resident_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    before = resident_bytes(os.getpid())
    held = mapped(tmp_path / name)
    grown = resident_bytes(os.getpid()) - before
    # Of other pages some may have been given back meanwhile.
    assert (grown > len(held) // 2) is (name != "log/data.mdb")


def test_a_spread_has_its_median_between_its_ends() -> None:
    assert spread_of("time", [3.0, 1.0, 2.0]) == {"time": 2.0, "time_low": 1.0, "time_high": 3.0}
    assert spread_of("time", range(101)) == {"time": 50, "time_low": 40, "time_high": 60}


@pytest.mark.parametrize(("name", "option"), [("release", "--rows"), ("consumers", "--rows")])
def test_sizes_have_bounds(name: str, option: str) -> None:
    refused = CliRunner().invoke(bench, [name, option, "0"])
    assert refused.exit_code == 2
    assert option in refused.output
