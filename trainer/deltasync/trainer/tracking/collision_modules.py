"""Managed collision: publishes the maps from raw ids to rows as tables, and finds the shard of a raw id."""

from collections.abc import Callable, Iterator
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
from deltasync.base.words import counted
from deltasync.client.targets.torch_collision import not_found
from deltasync.core.tables import FREE_ID, Shard, TableKind, TableSpec
from deltasync.kernels.tracking import read_sorted
from deltasync.trainer.tracking.compared_rows import follow_numbers
from deltasync.trainer.tracking.modules import named_modules, table_fqn
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable

_INT64 = np.dtype("<i8")
_LARGEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Routing:
    """Finds the shard in which TorchRec looks up a raw id, as its input dist does.

    An id below `block * shards` goes to the shard of its block, any other id to shard `id % shards`. Ids are read
    as unsigned.
    """

    block: int  # Number of consecutive ids per shard.
    shards: int  # Number of shards.

    def range_of(self, shard: int) -> tuple[int, int]:
        """The first raw id of a shard's block and the end of the block, which is at most the largest int64."""
        return self.block * shard, min(self.block * (shard + 1), _LARGEST)

    def shards_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The shard of each raw id: int64 [n] for int64 [n]."""
        in_turn = torch.where(ids < 0, ids % self.shards + 2**64 % self.shards, ids) % self.shards
        inside = (ids >= 0) & (ids < min(self.block * self.shards, _LARGEST))
        return torch.where(inside, ids // self.block, in_turn)


@dataclass(frozen=True, eq=False)
class CollisionModule:
    """A managed collision module, and this rank's shard of the table whose rows it assigns to raw ids."""

    name: str  # The module's FQN.
    module: Any  # The module, with the raw ids of this rank's rows.
    of: str  # The table's FQN.
    rows: int  # Number of rows of the table.
    row_offset: int  # The first row of this rank.
    number: int  # Number of this rank's shard.
    shards: int  # Number of shards of the table.
    sharded: bool  # Whether the table is sharded, even if only over one rank.

    @property
    def hashes(self) -> bool:
        """Whether the module finds raw ids by hashing (HashZch) instead of in a sorted list."""
        # An `isinstance` would import HashZch, which compiles kernels.
        return hasattr(self.module, "_hash_zch_identities")

    @property
    def local_rows(self) -> int:
        """Number of this rank's rows."""
        return int(self.module.output_size())

    @property
    def routing(self) -> Routing:
        """The shards that raw ids go to."""
        below = int(self.module.input_size()) or _LARGEST
        return Routing(-(-below // self.shards), self.shards)

    @property
    def tables(self) -> list[TableSpec]:
        """The table of the map and, if each shard has one row for unknown raw ids, the table of those rows."""
        raw_ids = TableSpec(f"{self.name}.raw_ids", self.rows, 1, _INT64, TableKind.ID_MAP, self.of)
        ranges = TableSpec(f"{self.name}.id_ranges", self.rows, 3, _INT64, TableKind.ID_RANGES, self.of)
        return [raw_ids] if self.hashes else [raw_ids, ranges]

    def shard(self, table: TableSpec) -> Shard:
        """This rank's rows of one of these tables."""
        return Shard(table, self.row_offset, self.local_rows, 0, table.dim)


def collision_modules(model: nn.Module) -> list[CollisionModule]:
    """All managed collision modules of a model."""
    by_id = {
        id(one.module): one
        for name, module in named_modules(model)
        if hasattr(module, "_managed_collision_collection") and hasattr(module, "_embedding_module")
        for one in _of_collection(name, module)
    }
    for name, module in named_modules(model):
        if isinstance(module, ManagedCollisionModule) and id(module) not in by_id:
            raise InvalidInput(
                f"managed collision module {name!r} belongs to no table: only those of a "
                "ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection can be published"
            )
    for one in by_id.values():
        _check(one)
    return list(by_id.values())


def _of_collection(name: str, module: Any) -> Iterator[CollisionModule]:
    collection = module._managed_collision_collection
    for table, collisions in collection._managed_collision_modules.items():
        fqn = ".".join(
            part for part in (name, "_managed_collision_collection._managed_collision_modules", table) if part
        )
        rows = collection._table_name_to_config[table].num_embeddings
        offsets, offset = _shard_offsets(collection, table)
        embeddings, inside = module._embedding_module, f"{name}._embedding_module".removeprefix(".")
        if isinstance(embeddings, ShardedEmbeddingModule):
            of = table_fqn(inside, embeddings, table)
        else:
            kind = "embedding_bags" if isinstance(embeddings, EmbeddingBagCollection) else "embeddings"
            of = f"{inside}.{kind}.{table}"
        sharded = isinstance(collection, ShardedManagedCollisionCollection)
        yield CollisionModule(fqn, collisions, of, rows, offset, offsets.index(offset), len(offsets), sharded)


def _shard_offsets(collection: nn.Module, table: str) -> tuple[list[int], int]:
    """The first row of each shard of a table, and the first row of this rank's shard."""
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
            f"module {one.name!r}: input_hash_size is 0, which spreads raw ids over ranks in a way that cannot be "
            "published; set it above the largest raw id"
        )


class CollisionMapShard:
    """This rank's share of the map of a managed collision module, as tracked tables. Use within the gate."""

    def __init__(self, collision: CollisionModule) -> None:
        """Read the current map."""
        self.of = collision.of  # The table whose rows the map assigns to raw ids.
        self._collision = collision
        self._version: tuple[int, ...] = ()
        self._column = torch.zeros(collision.local_rows, dtype=torch.int64, device=collision.module.device)
        self.tables = [self._tracked(table) for table in collision.tables]
        self.update()

    def update(self) -> torch.Tensor:
        """Read the map again; return the local ids of rows whose raw id has changed: int64 [n]."""
        module, version = self._collision.module, tuple[int, ...]()
        if not self._collision.hashes:  # A kernel writes to a hashed map without changing these numbers.
            tensors = (module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping)
            version = tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))
        if version and version == self._version:
            return self._column.new_empty(0)
        if self._collision.hashes:  # Free rows have -1 here. A row with raw id `FREE_ID` is published as free too.
            identities = module._hash_zch_identities.detach().view(-1)
            changed = follow_numbers(identities, FREE_ID, -1, self._column)
        else:
            changed = follow_numbers(self._sorted(), 0, 0, self._column)
        self._version = version
        return changed

    def staged(self, entries: torch.Tensor) -> Callable[[], None]:
        """Check another map for this rank's rows; returns a function that writes it into the module.

        For evictions, its raw ids then count as looked up once, just now. Evictions that the module has not
        reported yet are dropped.
        """
        rows = torch.nonzero(entries.view(-1)).view(-1)
        raw = entries.view(-1)[rows] ^ FREE_ID
        stage = self._staged_hashes if self._collision.hashes else self._staged_sorted
        return stage(rows, raw)

    def _staged_sorted(self, rows: torch.Tensor, raw: torch.Tensor) -> Callable[[], None]:
        collision, module = self._collision, self._collision.module
        order = torch.argsort(raw)
        rows, raw = rows[order], raw[order]
        elsewhere = torch.zeros(len(raw), dtype=torch.bool)
        elsewhere[self._unreached(raw)] = True
        # A shard's last row is for unknown raw ids.
        self._check_staged(rows, raw, elsewhere | (rows == collision.local_rows - 1))
        self._check(raw, rows)
        free = torch.ones(collision.local_rows, dtype=torch.bool)
        free[rows] = False
        mapping = torch.cat([rows, torch.nonzero(free).view(-1)]) + collision.row_offset

        def write() -> None:
            module.evict()
            module._mch_sorted_raw_ids.fill_(FREE_ID)[: len(raw)] = raw.to(module.device)
            module._mch_remapped_ids_mapping.copy_(mapping)
            # As if each id had been looked up once, now. Free rows go first, having lower numbers or the same.
            firsts = {"counts": 1, "last_access_iter": int(module._current_iter_tensor)}
            for name, numbers in module._mch_metadata.items():
                numbers.fill_(0)[: len(raw)] = firsts.get(name, 0)

        return write

    def _staged_hashes(self, rows: torch.Tensor, raw: torch.Tensor) -> Callable[[], None]:
        module = self._collision.module
        identities = torch.full_like(module._hash_zch_identities.data, -1)
        identities[rows.to(identities.device), 0] = raw.to(identities.device)
        self._check_staged(rows, raw, _lost(module, identities, rows, raw))

        def write() -> None:
            module.evict()
            module._hash_zch_identities.data.copy_(identities)

        return write

    def _check_staged(self, rows: torch.Tensor, raw: torch.Tensor, lost: torch.Tensor) -> None:
        """Check that lookups will find the local `rows` of raw ids, except those in the mask `lost`: [n] each."""
        if not lost.any():
            return
        collision, first = self._collision, torch.nonzero(lost)[0]
        raise InvalidInput(
            f"managed collision module {collision.name!r}: {counted(int(lost.sum()), 'raw id')} of shard "
            f"{collision.number} of {collision.shards} would not be found there, such as {int(raw[first])} with "
            f"row {int(rows[first]) + collision.row_offset}: shard table {collision.of!r} as the trainer that "
            "published it did, and give the module the same sizes"
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._column.nbytes

    def _tracked(self, table: TableSpec) -> TrackedTable:
        rows = self._column.view(-1, 1) if table.kind is TableKind.ID_MAP else _ranges(self._collision)
        return TrackedTable(
            table, [TrackedShard(self._collision.shard(table), rows)], [], fused=False, replicated=False
        )

    def _sorted(self) -> torch.Tensor:
        column, collision = torch.zeros_like(self._column), self._collision
        if column.is_cuda:
            return self._checked_column()
        raw, rows = collision.module._mch_sorted_raw_ids, collision.module._mch_remapped_ids_mapping
        first, end = collision.routing.range_of(collision.number)
        unsound = read_sorted(raw.numpy(), rows.numpy(), collision.row_offset, first, end, column.numpy())
        return self._checked_column() if unsound else column

    def _checked_column(self) -> torch.Tensor:
        """Read a map in any memory, with checks, and without raw ids that are looked up in another shard."""
        module = self._collision.module
        in_use = module._mch_sorted_raw_ids != FREE_ID
        raw = module._mch_sorted_raw_ids[in_use]
        rows = module._mch_remapped_ids_mapping[in_use] - self._collision.row_offset
        self._check(raw, rows)
        column = torch.zeros_like(self._column)
        column[rows] = raw ^ FREE_ID
        column[rows[self._unreached(raw)]] = 0
        return column

    def _unreached(self, raw: torch.Tensor) -> torch.Tensor:
        """Positions of the raw ids [n] that are looked up on other ranks, which may happen after a reshard."""
        routing, number = self._collision.routing, self._collision.number
        first, end = routing.range_of(number)
        # Usually none. Only divide for these, because divisions are slow.
        elsewhere = torch.nonzero((raw < first) | (raw >= end)).squeeze(1)
        return elsewhere[routing.shards_of(raw[elsewhere]) != number]

    def _check(self, raw: torch.Tensor, rows: torch.Tensor) -> None:
        """Check raw ids [n] and their local rows [n]."""
        collision, first = self._collision, self._collision.row_offset
        if _is_sound(raw, rows, collision.local_rows):
            return
        problem = _problem(raw, rows, collision.local_rows, first)
        if problem:
            raise InvalidInput(
                f"managed collision module {collision.name!r}: {problem}; it holds rows {first} to "
                f"{first + collision.local_rows - 1} of table {collision.of!r}"
            )


def _ranges(collision: CollisionModule) -> torch.Tensor:
    """A shard of the table of ranges: zeros except in the last row, which is for raw ids outside the map."""
    rows = torch.from_numpy(np.zeros((collision.local_rows, 3), np.int64))  # Untouched pages cost no memory.
    rows[-1] = torch.tensor([*collision.routing.range_of(collision.number), collision.row_offset])
    return rows


def _lost(module: Any, identities: torch.Tensor, rows: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """A mask of the raw ids [n] that a hashing module would not find in local rows [n]: bool [n]."""
    device = identities.device
    try:
        offset = module._output_global_offset_tensor
        _, sizes, starts = module.input_mapper(values=raw.to(device), output_offset=offset)
    except (IndexError, RuntimeError):  # An id belongs to no bucket.
        return torch.ones(len(raw), dtype=torch.bool)
    # The kernel reads the bucket's memory, so check first that the bucket is in this shard.
    outside = ((rows.to(device) < starts) | (rows.to(device) >= starts + sizes)).cpu()
    return outside if outside.any() else not_found(module, identities, raw.to(device))


def _is_sound(raw: torch.Tensor, rows: torch.Tensor, local_rows: int) -> bool:
    """Quickly check a map that is sorted by raw id; `_problem` takes far longer."""
    in_use = torch.zeros(local_rows, dtype=torch.bool, device=rows.device)
    in_use[rows[(rows >= 0) & (rows < local_rows)]] = True
    return bool((in_use.sum() == len(rows)) & (raw[1:] > raw[:-1]).all())


def _problem(raw: torch.Tensor, rows: torch.Tensor, local_rows: int, first: int) -> str | None:
    if len(outside := torch.nonzero((rows < 0) | (rows >= local_rows))):
        return f"raw id {int(raw[outside[0]])} has row {int(rows[outside[0]]) + first}"
    if pair := _equal_pair(rows):
        return f"raw ids {int(raw[pair[0]])} and {int(raw[pair[1]])} both have row {int(rows[pair[0]]) + first}"
    if pair := _equal_pair(raw):
        both = f"{int(rows[pair[0]]) + first} and {int(rows[pair[1]]) + first}"
        return f"raw id {int(raw[pair[0]])} has two rows, {both}"
    return None


def _equal_pair(numbers: torch.Tensor) -> tuple[int, int] | None:
    """The positions of two equal numbers among [n]; None if all differ."""
    ordered, order = torch.sort(numbers, stable=True)
    equal = torch.nonzero(ordered[1:] == ordered[:-1]).view(-1)
    return (int(order[equal[0]]), int(order[equal[0] + 1])) if len(equal) else None
