"""Managed collision that TorchRec has sharded for inference.

There each shard has a map of its own, and raw ids reach the shards as if they were rows: by the offsets of the
shards' rows, where a trainer sends them by its ranks' ranges of raw ids. No shard's map can be a part of the
trainer's. So the whole map is looked up before ids are sent: in the module that has its name, which TorchRec only
asks to prepare ids there. What is sent are then rows indeed, and reach their shards, however many there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from deltasync.client.modules.collision import MODULES, SHARDED
from deltasync.client.modules.id_map import HashedIds, SortedIds, id_map_of
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec


def sharded_map_of(module: nn.Module, table: TableSpec) -> "ShardedMap | SortedIds | HashedIds":
    """The place of a map of raw ids, of shards or not; raises what `id_map_of` does."""
    whole = id_map_of(module, table)
    path, _, _ = whole.name.rpartition(f".{MODULES}.")
    collection = module.get_submodule(path)
    return ShardedMap(whole, collection) if hasattr(collection, SHARDED) else whole


@dataclass(frozen=True, eq=False)
class ShardedMap:
    """The map of a module whose rows are sharded for inference.

    Attributes:
        whole: the map itself.
        collection: what has the module, and those of the shards.
    """

    whole: SortedIds | HashedIds
    collection: Any

    @property
    def name(self) -> str:
        """The module's FQN."""
        return self.whole.name

    @property
    def table(self) -> TableSpec:
        """The table."""
        return self.whole.table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`; raises what that of the map does."""
        write_map = self.whole.stage(rows, reset=reset)

        def write() -> None:
            write_map()
            self._look_up_before_sending()

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        return self.whole.read(ids)

    def _look_up_before_sending(self) -> None:
        _, _, table = self.name.rpartition(".")
        module = getattr(self.collection, MODULES)[table]
        vars(module).update(preprocess=MethodType(_rows_of, module), input_size=module.output_size)
        for rank in getattr(self.collection, SHARDED):
            vars(rank[table])["forward"] = _unchanged
        for dist in self.collection._input_dists:  # Made in the first forward; 0 sends ids to the shards in turn.
            dist.feature_block_sizes.clamp_(min=1)


def _rows_of(module: Any, features: dict[str, Any]) -> dict[str, Any]:
    """`preprocess` of a managed collision module: the rows of raw ids, where these are."""
    here = next(module.buffers()).device
    raw = {name: each.to(here) for name, each in features.items()}
    rows = module.remap(type(module).preprocess(module, raw))
    return {name: each.to(features[name].device()) for name, each in rows.items()}


def _unchanged(features: dict[str, Any]) -> dict[str, Any]:
    """`forward` of a shard's module: what reaches it are rows already."""
    return features
