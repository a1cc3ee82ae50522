"""`python -m tests.bench serve`, small: the figures are of the work they tell of."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bench.serve import CHECKED, WAYS
from tests.support.programs import run_program

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    found: Path = tmp_path_factory.mktemp("serve") / "figures.json"
    sizes = ("--rows", "2000", "--dim", "8", "--rounds", "2", "--seconds", "0.3", "--releases-per-second", "50")
    done = run_program(sys.executable, "-m", "tests.bench", "serve", *sizes, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text()), done.stdout


def test_every_way_of_reading_is_measured_with_rows_replaced(serve: tuple[dict[str, Any], str]) -> None:
    figures, said = serve
    for way in (*WAYS, CHECKED):
        assert way in said
        assert figures[f"{way}_replaced_rows_per_second"] > 0
        for name in ("lookup_ratio", "p99_ratio"):
            key = f"{way}_{name}"
            assert 0 < figures[f"{key}_low"] <= figures[key] <= figures[f"{key}_high"]


def test_the_figures_without_a_way_are_those_of_the_default(serve: tuple[dict[str, Any], str]) -> None:
    figures, _ = serve
    assert figures["default"] in WAYS
    for name in ("lookup_ratio", "p99_ratio", "lookups_per_second"):
        assert figures[name] == figures[f"{figures['default']}_{name}"]
    assert 0 < figures["apply_ratio_low"] <= figures["apply_ratio"] <= figures["apply_ratio_high"]
