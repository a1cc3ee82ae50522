"""The scenarios of rows that are reset: evicted, or deleted."""

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios("tests.integration.trainer.deletes.scenarios")
