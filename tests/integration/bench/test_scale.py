"""`python -m tests.bench scale`, small: the figures are of the work they tell of."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.bench.scale import uniform, zipf
from tests.support.programs import run_program

from deltasync.core.rows import Ids


@pytest.mark.nightly
def test_the_cost_of_a_cut_is_told_by_the_size_of_the_table(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    sizes = ("--rows", "4000", "--small-rows", "1000", "--cut-rows", "100", "--rounds", "3")
    done = run_program(sys.executable, "-m", "tests.bench", "scale", *sizes, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(found.read_text())
    ratios = figures["policies"]
    assert [*ratios] == ["everything", "top-k 10 %"]
    assert all([*kinds] == ["uniform", "zipf"] for kinds in ratios.values())
    worst = {name: max(each["ratio"] for each in kinds.values()) for name, kinds in ratios.items()}
    assert worst == {"everything": figures["scale_ratio"], "top-k 10 %": figures["scale_topk_ratio"]}
    assert figures["scale_lag_ratio"] == max(
        each["lag_ratio"] for kinds in ratios.values() for each in kinds.values()
    )


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
