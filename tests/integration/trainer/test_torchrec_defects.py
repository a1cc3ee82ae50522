"""Every row of the table of defects in TorchRec's tracker, as a test of ours.

Starting ranks takes longer than all they do, so one run plays all scenarios for a number of ranks.
"""

import json
from pathlib import Path

import pytest

from tests.integration.trainer.torchrec_defects import scenarios  # noqa: F401
from tests.integration.trainer.torchrec_defects.registry import SCENARIOS, Scenario, in_order
from tests.support.ranks import run_ranks

# How each scenario has ended on each rank: "" if it did not fail, missing if it was not played.
Outcomes = list[dict[str, str]]
ROWS = 28


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _play(tmp_path_factory.mktemp("one"), ranks=1)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _play(tmp_path_factory.mktemp("two"), ranks=2)


def _play(folder: Path, ranks: int) -> Outcomes:
    run_ranks("-m", "tests.integration.trainer.torchrec_defects.ranks", str(folder), ranks=ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _check(outcomes: Outcomes, scenario: Scenario) -> None:
    ends = [one.get(scenario.id, "not played: an earlier scenario has left a rank alone") for one in outcomes]
    if any(ends):
        pytest.fail("\n".join(f"rank {rank}: {end or 'passed'}" for rank, end in enumerate(ends)), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.id) for one in in_order() if one.ranks == 1])
def test_on_one_rank(of_one_rank: Outcomes, scenario: Scenario) -> None:
    _check(of_one_rank, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.id) for one in in_order() if one.ranks == 2])
def test_on_two_ranks(of_two_ranks: Outcomes, scenario: Scenario) -> None:
    _check(of_two_ranks, scenario)


def test_every_row_has_a_scenario() -> None:
    assert {one.row for one in SCENARIOS} == set(range(ROWS + 1))
    assert {one.ranks for one in SCENARIOS} == {1, 2}
