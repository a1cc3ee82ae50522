"""Noticing that modules have made new lookups: all that was attached to the ones before is attached to nothing."""

from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import lookups_of


class LookupsHeld:
    """The lookups of a model, as `DistributedModelParallel.reshard` replaces them. In the thread that trains."""

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[str, tuple[ShardedEmbeddingModule, list[Any]]] = {
            name: (module, list(lookups_of(module))) for name, module in sharded_modules(model)
        }

    def renewed(self) -> list[str]:
        """FQNs of modules whose lookups are others by now."""
        return [name for name, (module, held) in self._held.items() if not _same(held, list(lookups_of(module)))]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
