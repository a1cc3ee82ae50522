"""The training pipelines on ranks, compared with plain training."""

import pytest
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.support.scenarios import Outcomes, Scenario, parametrized


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("two"), ranks=2)


@parametrized(SCENARIOS, ranks=2)
def test_on_two_ranks(of_two_ranks: Outcomes, scenario: Scenario) -> None:
    of_two_ranks.check(scenario)
