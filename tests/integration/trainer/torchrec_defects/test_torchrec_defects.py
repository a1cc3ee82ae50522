"""Every row of the table of defects in TorchRec's tracker, as a test of ours."""

import pytest
from tests.integration.trainer.torchrec_defects.scenarios import SCENARIOS
from tests.support.scenarios import Outcomes, Scenario, parametrized

ROWS = 28


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("one"), ranks=1)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("two"), ranks=2)


@pytest.mark.slow
@parametrized(SCENARIOS, ranks=1)
def test_on_one_rank(of_one_rank: Outcomes, scenario: Scenario) -> None:
    of_one_rank.check(scenario)


@pytest.mark.slow
@parametrized(SCENARIOS, ranks=2)
def test_on_two_ranks(of_two_ranks: Outcomes, scenario: Scenario) -> None:
    of_two_ranks.check(scenario)


def test_every_row_has_a_scenario() -> None:
    assert {one.topic for one in SCENARIOS} == {f"row{row:02}" for row in range(ROWS + 1)}
    assert {one.ranks for one in SCENARIOS} == {1, 2}
