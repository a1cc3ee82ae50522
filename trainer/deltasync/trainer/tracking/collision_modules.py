"""The managed collision modules of a model: whose rows they give to raw ids, and which raw ids reach a shard."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.tracking.modules import named_modules, table_fqn

_IDENTITIES = "_hash_zch_identities"
_INT64 = np.dtype("<i8")
_LARGEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Routing:
    """Which of the shards of a table a raw id is looked up in, as TorchRec's input dist does it.

    Ids below `block * shards` go to the shard of their block, all others to the shards in turn; ids count as
    unsigned.

    Attributes:
        block: how many ids in a row go to one shard.
        shards: how many there are.
    """

    block: int
    shards: int

    def range_of(self, shard: int) -> tuple[int, int]:
        """The first raw id of a shard's block, and its end: the largest int64 at most."""
        return self.block * shard, min(self.block * (shard + 1), _LARGEST)

    def shards_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The shard of each of some raw ids: int64 [n] for int64 [n]."""
        in_turn = torch.where(ids < 0, ids % self.shards + 2**64 % self.shards, ids) % self.shards
        inside = (ids >= 0) & (ids < min(self.block * self.shards, _LARGEST))
        return torch.where(inside, ids // self.block, in_turn)


@dataclass(frozen=True, eq=False)
class CollisionModule:
    """A managed collision module, and the shard of the table whose rows it gives to raw ids.

    Attributes:
        name: the module's FQN.
        module: the module, with the raw ids of this rank's rows.
        of: the table's name.
        rows: the table's.
        row_offset: of this rank's rows.
        number: of this rank's shard.
        shards: how many there are.
        sharded: the table is, if only over one rank.
    """

    name: str
    module: Any
    of: str
    rows: int
    row_offset: int
    number: int
    shards: int
    sharded: bool

    @property
    def hashes(self) -> bool:
        """Whether a raw id is found by hashing; else, in a sorted list."""
        return hasattr(self.module, _IDENTITIES)  # Of HashZch, whose import compiles kernels.

    @property
    def local_rows(self) -> int:
        """Number of this rank's rows."""
        return int(self.module.output_size())

    @property
    def routing(self) -> Routing:
        """To which shard raw ids go."""
        below = int(self.module.input_size()) or _LARGEST
        return Routing(-(-below // self.shards), self.shards)

    @property
    def tables(self) -> list[TableSpec]:
        """Its map, and where unknown ids have one row in a shard, which row that is."""
        raw_ids = TableSpec(f"{self.name}.raw_ids", self.rows, 1, _INT64, TableKind.ID_MAP, self.of)
        ranges = TableSpec(f"{self.name}.id_ranges", self.rows, 3, _INT64, TableKind.ID_RANGES, self.of)
        return [raw_ids] if self.hashes else [raw_ids, ranges]

    def shard(self, table: TableSpec) -> Shard:
        """This rank's rows of one of these tables."""
        return Shard(table, self.row_offset, self.local_rows, 0, table.dim)


def collision_modules(model: nn.Module) -> list[CollisionModule]:
    """Every managed collision module of a model.

    Raises:
        InvalidInput: the map of one cannot be published.
    """
    found = {
        id(one.module): one
        for name, module in named_modules(model)
        if hasattr(module, "_managed_collision_collection") and hasattr(module, "_embedding_module")
        for one in _of_collection(name, module)
    }
    for name, module in named_modules(model):
        if isinstance(module, ManagedCollisionModule) and id(module) not in found:
            raise InvalidInput(
                f"managed collision module {name!r} belongs to no table: only those of a "
                "ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection can be published"
            )
    for one in found.values():
        _check(one)
    return list(found.values())


def _of_collection(name: str, module: Any) -> Iterator[CollisionModule]:
    collection = module._managed_collision_collection
    for table, collisions in collection._managed_collision_modules.items():
        fqn = ".".join(
            part for part in (name, "_managed_collision_collection._managed_collision_modules", table) if part
        )
        rows = collection._table_name_to_config[table].num_embeddings
        offsets, offset = _shard_offsets(collection, table)
        of = _table(f"{name}._embedding_module".removeprefix("."), module._embedding_module, table)
        sharded = isinstance(collection, ShardedManagedCollisionCollection)
        yield CollisionModule(fqn, collisions, of, rows, offset, offsets.index(offset), len(offsets), sharded)


def _table(name: str, embeddings: nn.Module, table: str) -> str:
    if isinstance(embeddings, ShardedEmbeddingModule):
        return table_fqn(name, embeddings, table)
    kind = "embedding_bags" if isinstance(embeddings, EmbeddingBagCollection) else "embeddings"
    return f"{name}.{kind}.{table}"


def _shard_offsets(collection: nn.Module, table: str) -> tuple[list[int], int]:
    """Of the rows of a table's shards, and of this rank's."""
    if not isinstance(collection, ShardedManagedCollisionCollection):
        return [0], 0
    for sharding in collection._embedding_shardings:
        for group in sharding._grouped_embedding_configs:
            for config in group.embedding_tables:
                if config.name == table:
                    shards = config.global_metadata.shards_metadata
                    return [shard.shard_offsets[0] for shard in shards], config.local_metadata.shard_offsets[0]
    raise InvalidInput(f"table {table!r} has managed collision, and no shard on this rank")


def _check(one: CollisionModule) -> None:
    if not (one.hashes or isinstance(one.module, MCHManagedCollisionModule)):
        raise InvalidInput(
            f"module {one.name!r} is a {type(one.module).__name__}, whose map from raw ids to rows cannot be "
            "published"
        )
    if not one.hashes and one.shards > 1 and not one.module.input_size():
        raise InvalidInput(
            f"module {one.name!r}: with an input_hash_size of 0 raw ids go to ranks in turn, which cannot be "
            "published"
        )
