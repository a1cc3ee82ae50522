"""All scenarios: importing this registers them."""

from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.scenarios import running

__all__ = ["SCENARIOS", "running"]
