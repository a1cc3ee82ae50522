"""All scenarios: importing this registers them."""

from tests.integration.trainer.deletes.registry import SCENARIOS
from tests.integration.trainer.deletes.scenarios import evictions, published, resets

__all__ = ["SCENARIOS", "evictions", "published", "resets"]
