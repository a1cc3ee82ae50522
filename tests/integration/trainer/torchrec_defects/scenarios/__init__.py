"""All scenarios: importing this registers them."""

from tests.integration.trainer.torchrec_defects.registry import SCENARIOS
from tests.integration.trainer.torchrec_defects.scenarios import (
    beyond,
    checkpoints,
    collision,
    consumers,
    hooks,
    interleaving,
    lookups,
    modes,
    momentum,
    pipelines,
    tables,
    threads,
)

__all__ = [
    "SCENARIOS",
    "beyond",
    "checkpoints",
    "collision",
    "consumers",
    "hooks",
    "interleaving",
    "lookups",
    "modes",
    "momentum",
    "pipelines",
    "tables",
    "threads",
]
