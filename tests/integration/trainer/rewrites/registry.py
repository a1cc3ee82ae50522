"""The scenarios of rows that change in other ways than by the lookups found at first."""

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios("tests.integration.trainer.rewrites.scenarios")
