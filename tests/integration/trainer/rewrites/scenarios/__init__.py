"""All scenarios: importing this registers them."""

from tests.integration.trainer.rewrites.registry import SCENARIOS
from tests.integration.trainer.rewrites.scenarios import averages, loads, optimizers, pipelines, resharding

__all__ = ["SCENARIOS", "averages", "loads", "optimizers", "pipelines", "resharding"]
