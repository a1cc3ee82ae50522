"""The scenarios of the training pipelines."""

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios("tests.integration.trainer.pipelines.scenarios", one_by_day=True)
