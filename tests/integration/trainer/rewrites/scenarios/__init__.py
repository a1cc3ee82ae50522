"""All scenarios: importing this registers them."""

from tests.integration.trainer.rewrites.registry import SCENARIOS
from tests.integration.trainer.rewrites.scenarios import loads, optimizers, pipelines, pooling, resharding

__all__ = ["SCENARIOS", "loads", "optimizers", "pipelines", "pooling", "resharding"]
