"""The tracked part of a model: its tables, and the tables that each kernel looks up."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import TableKind, TableSpec
from deltasync.trainer.checks import check_names
from deltasync.trainer.tracking.collision_modules import CollisionMapShard, collision_modules
from deltasync.trainer.tracking.module_tensors import UnpublishedState, check_extra_state, module_tensors
from deltasync.trainer.tracking.modules import is_skipped, sharded_modules, table_fqn
from deltasync.trainer.tracking.shards import (
    TrackedTable,
    dense_table,
    kernel_tables,
    lookups_of,
    merged,
    table_dtype,
)
from deltasync.trainer.tracking.torchrec_hooks import check_averages, is_replica
from deltasync.trainer.tracking.update_rules import check_settings, check_tracked

DEFAULT_CONSUMER = "default"


class TrackingMode(Enum):
    """The values that reads return in addition to ids, named as in TorchRec's tracker."""

    ID_ONLY = "id_only"
    """Nothing."""
    EMBEDDING_LAST = "embedding_last"
    """Current rows."""
    EMBEDDING = "embedding"
    """Current rows, and first values: those at the consumer's cursor. Each consumer costs a copy of all rows in
    host memory."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """What to track, and for whom.

    Attributes:
        consumers: names of the first consumers; `add_consumer` adds more.
        mode: what their reads return in addition to ids.
        fqns_to_skip: tables not to track, each by its FQN, its name, one of its parents or any consecutive parts
            of its FQN.
        dense: also track the parameters and buffers outside embedding tables, each as a small table.
        id_maps: also track managed collision's maps from raw ids to rows.
        replicas: also track tables and parameters of which every rank has a copy. Only one rank needs to publish
            them.
        verify: for debugging a model: keep a copy of every row, compare all rows at every read, and raise
            `Contradiction` with the rows that have changed without a mark. Costs the memory of a second model, and
            the time to read both.
    """

    consumers: Sequence[str] = (DEFAULT_CONSUMER,)
    mode: TrackingMode = TrackingMode.ID_ONLY
    fqns_to_skip: Collection[str] = ()
    dense: bool = False
    id_maps: bool = False
    replicas: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        check_names("consumers", self.consumers)
        check_names("fqns_to_skip", self.fqns_to_skip)
        if not isinstance(self.mode, TrackingMode):
            raise InvalidInput(f"mode: {self.mode!r}, expected a TrackingMode")

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        return {name: value for name, value in vars(self).items() if name not in ("dense", "replicas")}


# The number of the table to mark (None = none), and the number of features that are looked up in it.
Lookup = tuple[int | None, int]
# The lookups of each kernel, in its order.
Lookups = dict[nn.Module, list[Lookup]]


@dataclass(frozen=True)
class TrackedModel:
    """The tracked part of a model, on this rank."""

    modules: dict[str, ShardedEmbeddingModule]  # Sharded modules by FQN.
    tables: list[TrackedTable]  # This rank's share of each table.
    replicas: list[TrackedTable]  # Copies of tables whose rows another rank tracks.
    lookups: Lookups  # What each kernel looks up.
    # The kernels of modules that this rank does not share with other ranks. Their ids are in the memory of the
    # trainer's batch, which the trainer may overwrite after backward.
    alone: frozenset[nn.Module]
    id_maps: list[CollisionMapShard]  # The maps of managed collision for `tables`.
    unpublished: UnpublishedState | None  # State outside all tables, which must not change; None if it may.


def tracked_model(model: nn.Module, options: TrackerOptions) -> TrackedModel:
    """Find the tables of a model, without those that `options` skip."""
    modules = dict(sharded_modules(model))
    # `fqns_to_skip` may name dense tensors, so even ranks that do not track these need their names for the check.
    skips = options.fqns_to_skip
    tensors = module_tensors(model, dense=options.dense or bool(skips), fqns_to_skip=skips)
    outside = [tensor for tensor in tensors if options.dense or tensor.kind is TableKind.EMBEDDING]
    maps = [CollisionMapShard(each) for each in collision_modules(model)] if options.id_maps else []
    fqns = [fqn for name, module in modules.items() for fqn, _ in _configs(name, module)]
    fqns += [tensor.name for tensor in tensors] + [table.name for table in _tables_of_maps(maps)]
    for skip in skips:
        if not any(is_skipped(fqn, [skip]) for fqn in fqns):
            raise InvalidInput(f"fqns_to_skip: {skip!r} matches no table; tables: {', '.join(fqns)}")
    check_averages(model)
    kernels, alone = {}, set[nn.Module]()
    for name, module in modules.items():
        for fqn, config in _configs(name, module, skips):
            check_settings(fqn, config, module.module_sharding_plan[config.name].compute_kernel)
        for kernel in (kernel for lookup in lookups_of(module) for kernel in lookup._emb_modules):
            fqns = [table_fqn(name, module, config.name) for config in kernel._config.embedding_tables]
            if all(is_skipped(fqn, skips) for fqn in fqns):
                continue
            check_tracked(name, kernel)
            tables = kernel_tables(name, module, kernel)
            if module._env.world_size == 1:  # The size of the sharding group, also with 2D parallelism.
                alone.add(kernel)
            kernels[kernel] = (
                [replace(table, replicated=True) for table in tables] if is_replica(module) else tables
            )
    in_kernels = merged([table for tables in kernels.values() for table in tables])
    chosen = [table for table in in_kernels if not is_skipped(table.name, skips)]
    chosen += [dense_table(tensor) for tensor in outside if not is_skipped(tensor.name, skips)]
    tables = [table for table in chosen if options.replicas or not table.replicated]
    replicas = [table for table in chosen if table not in tables]
    maps = [one for one in maps if any(table.name == one.of for table in tables)]
    tables += [table for table in _tables_of_maps(maps) if not is_skipped(table.name, skips)]
    numbers = {table.name: number for number, table in enumerate(tables) if table.fused}
    lookups = {kernel: _lookups(of_kernel, numbers) for kernel, of_kernel in kernels.items()}
    if options.dense:
        check_extra_state(model, skips)
    unpublished = UnpublishedState(model, skips) if options.dense else None
    return TrackedModel(modules, tables, replicas, lookups, frozenset(alone), maps, unpublished)


def published_tables(model: nn.Module, *, dense: bool, fqns_to_skip: Collection[str] = ()) -> list[TableSpec]:
    """All tables of a model to publish, in the same order on all ranks."""
    tables = []
    for name, module in sharded_modules(model):
        for fqn, config in _configs(name, module, fqns_to_skip):
            dtype = table_dtype(fqn, data_type_to_dtype(config.data_type))
            tables.append(TableSpec(fqn, config.num_embeddings, config.embedding_dim, dtype))
    if dense:  # Check on all ranks, or the others would wait for the rank that fails.
        check_extra_state(model, fqns_to_skip)
    outside = module_tensors(model, dense=dense, fqns_to_skip=fqns_to_skip)
    tables += [dense_table(tensor).table for tensor in outside if not is_skipped(tensor.name, fqns_to_skip)]
    names = {table.name for table in tables}
    maps = [table for collision in collision_modules(model) for table in collision.tables if table.of in names]
    return tables + [table for table in maps if not is_skipped(table.name, fqns_to_skip)]


def _tables_of_maps(maps: list[CollisionMapShard]) -> list[TrackedTable]:
    return [table for one in maps for table in one.tables]


def _lookups(tables: list[TrackedTable], numbers: dict[str, int]) -> list[Lookup]:
    """The lookups of tables. Column shards of a table get the same ids, so only those of the first are marked."""
    seen = set[str]()
    lookups: list[Lookup] = []
    for table in tables:
        number = None if table.name in seen else numbers.get(table.name)
        lookups.append((number, len(table.features)))
        seen.add(table.name)
    return lookups


def _configs(
    name: str, module: Any, fqns_to_skip: Collection[str] = ()
) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """FQN and config of each table of a module on any rank, without skipped tables."""
    for config in module._table_name_to_config.values():
        fqn = table_fqn(name, module, config.name)
        if not is_skipped(fqn, fqns_to_skip):
            yield fqn, config
