"""All scenarios: importing this registers them."""

from tests.integration.trainer.torchrec_defects.scenarios import (
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
