"""Rows that change in other ways than by the lookups found at first: a copy of the deltas equals the model."""

import pytest
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.support.scenarios import Outcomes, Scenario, parametrized


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("two"), ranks=2)


@parametrized(SCENARIOS, ranks=2)
def test_on_two_ranks(of_two_ranks: Outcomes, scenario: Scenario) -> None:
    of_two_ranks.check(scenario)
