"""Noticing that modules have made new lookups: all that was attached to the ones before is attached to nothing."""

from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import lookups_of


class LookupsHeld:
    """The lookups of a model, as `DistributedModelParallel.reshard` replaces them. In the thread that trains."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [_Held(name, module) for name, module in sharded_modules(model)]

    def renewed(self) -> list[str]:
        """FQNs of modules whose lookups are others by now."""
        return [held.name for held in self._held if held.is_renewed()]


class _Held:
    """The lookups of a module: `wrapped` in what makes them distributed, if anything does, and themselves."""

    def __init__(self, name: str, module: ShardedEmbeddingModule) -> None:
        self.name, self._module = name, module
        self._wrapped, self._lookups = list[Any](module._lookups), list(lookups_of(module))

    def is_renewed(self) -> bool:
        # Modules are equal if they are the same. Most are wrapped as before, which is soon seen, at each step.
        return self._module._lookups != self._wrapped and list(lookups_of(self._module)) != self._lookups
