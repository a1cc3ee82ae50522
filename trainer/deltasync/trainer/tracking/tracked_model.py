"""The tracked part of a model: its tables, and which of them the lookups of each kernel change."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import FREE_ID, TableKind, TableSpec
from deltasync.kernels.id_maps import read_sorted
from deltasync.trainer.tracking.collision_modules import CollisionModule, collision_modules
from deltasync.trainer.tracking.followed_rows import follow_numbers
from deltasync.trainer.tracking.module_tensors import module_tensors
from deltasync.trainer.tracking.modules import is_skipped, modules_outside_of_tables, sharded_modules, table_fqn
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.rewrites import check_averages, is_replica
from deltasync.trainer.tracking.shards import (
    TrackedShard,
    TrackedTable,
    dense_table,
    kernel_tables,
    lookups_of,
    merged,
    table_dtype,
)
from deltasync.trainer.tracking.update_rules import check_settings, check_tracked

_ADVICE = "or publish without what is outside of embedding tables (dense=False)"


class UnpublishedState:
    """State outside of embedding tables that `state_dict` does not have as tensors, and what has none of it yet.

    In whichever thread reads, within the gate.
    """

    def __init__(self, model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
        """Remember what there is, except in modules that are skipped."""
        modules = modules_outside_of_tables(model)
        self._modules = [(name, module) for name, module in modules if not is_skipped(name, fqns_to_skip)]
        self._names = [_names(module) for _, module in self._modules]
        self._copies = {
            (name, attribute): (module, _Buffer.of(buffer))
            for name, module in self._modules
            for attribute, buffer in module._buffers.items()
            if buffer is not None and attribute in module._non_persistent_buffers_set
        }

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(before.nbytes for _, before in self._copies.values())

    def check(self) -> None:
        """Check that it is as it was.

        Raises:
            InvalidInput: a buffer that is not persistent has changed, or modules have more parameters or buffers.
        """
        for (name, module), names in zip(self._modules, self._names, strict=True):
            if more := _names(module) - names:
                found = ", ".join(map(repr, sorted(more)))
                raise InvalidInput(
                    f"module {name!r} has got {found}, which is not published: restart publishing with the model "
                    "as it is"
                )
        for (name, attribute), (module, before) in self._copies.items():
            if not before.equals(module._buffers.get(attribute)):
                raise InvalidInput(
                    f"buffer {f'{name}.{attribute}'.removeprefix('.')!r} has changed and is not in the state_dict "
                    f"(persistent=False), so that no predictor would learn of it: make it persistent, {_ADVICE}"
                )


def check_extra_state(model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
    """Check that no module outside of embedding tables, but for those that are skipped, has extra state.

    Raises:
        InvalidInput: one has.
    """
    for name, module in modules_outside_of_tables(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state and not is_skipped(name, fqns_to_skip):
            raise InvalidInput(
                f"module {name!r}, a {type(module).__name__}, has state of its own (get_extra_state), which "
                f"cannot be published: keep it in buffers, {_ADVICE}"
            )


def _names(module: nn.Module) -> set[str]:
    held = (*module._parameters.items(), *module._buffers.items())
    return {name for name, tensor in held if tensor is not None}


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer as it was.

    Attributes:
        tensor: itself.
        version: how often PyTorch had seen it change.
        bits: a copy; None where it cannot be read as an array, since it is sparse, say.
    """

    tensor: torch.Tensor
    version: int
    bits: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Buffer":
        bits = _bits(tensor)
        return cls(tensor, _version(tensor), None if bits is None else bits.clone())

    @property
    def nbytes(self) -> int:
        return 0 if self.bits is None else self.bits.nbytes

    def equals(self, now: torch.Tensor | None) -> bool:
        if now is None or (now.shape, now.dtype) != (self.tensor.shape, self.tensor.dtype):
            return False
        bits = _bits(now)
        if bits is None or self.bits is None:
            return now is self.tensor and _version(now) == self.version
        return torch.equal(bits, self.bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class IdMap:
    """The map of one managed collision module, as far as this rank has it. Within the gate.

    Attributes:
        of: the table whose rows it gives to raw ids.
        tables: the map, and the ranges of raw ids if there are some.
    """

    def __init__(self, found: CollisionModule) -> None:
        """The map as it is now.

        Raises:
            InvalidInput: it contradicts itself.
        """
        self._found, self.of = found, found.of
        self._version: tuple[int, ...] = ()
        self._column = torch.zeros(found.local_rows, dtype=torch.int64, device=found.module.device)
        self.tables = [self._tracked(table) for table in found.tables]
        self.update()

    def update(self) -> torch.Tensor:
        """Read the map anew; the local ids of the rows whose raw id has changed: int64 [n].

        Raises:
            InvalidInput: it contradicts itself; nothing was read.
        """
        version = self._buffers_version()
        if version and version == self._version:
            return self._column.new_empty(0)
        if self._found.hashes:  # Its free rows have -1. A row of `FREE_ID` is published as free, too.
            changed = follow_numbers(self._identities(), FREE_ID, -1, self._column)
        else:
            changed = follow_numbers(self._sorted(), 0, 0, self._column)
        self._version = version
        return changed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._column.nbytes

    def _tracked(self, table: TableSpec) -> TrackedTable:
        rows = self._column.view(-1, 1) if table.kind is TableKind.ID_MAP else _ranges(self._found)
        return TrackedTable(
            table, [TrackedShard(self._found.shard(table), rows)], [], fused=False, replicated=False
        )

    def _buffers_version(self) -> tuple[int, ...]:
        """What changes whenever a sorted map does; empty for one that a kernel writes to without saying so."""
        if self._found.hashes:
            return ()
        module = self._found.module
        tensors = (module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping)
        return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))

    def _identities(self) -> torch.Tensor:
        identities: torch.Tensor = self._found.module._hash_zch_identities.detach().view(-1)
        return identities

    def _sorted(self) -> torch.Tensor:
        column = torch.zeros_like(self._column)
        if column.is_cuda or not self._is_read(column):
            column = self._looked_through()
        return column

    def _is_read(self, column: torch.Tensor) -> bool:
        """Read a map in host memory into `column`, zeros; False where it has to be looked through."""
        found = self._found
        raw, rows = found.module._mch_sorted_raw_ids, found.module._mch_remapped_ids_mapping
        first, end = found.routing.range_of(found.number)
        return not read_sorted(raw.numpy(), rows.numpy(), found.row_offset, first, end, column.numpy())

    def _looked_through(self) -> torch.Tensor:
        """The column of a map anywhere, of which some raw ids may not be looked up here, or be wrong."""
        module = self._found.module
        taken = module._mch_sorted_raw_ids != FREE_ID
        raw = module._mch_sorted_raw_ids[taken]
        rows = module._mch_remapped_ids_mapping[taken] - self._found.row_offset
        self._check(raw, rows)
        column = torch.zeros_like(self._column)
        column[rows] = raw ^ FREE_ID
        column[rows[self._unreached(raw)]] = 0
        return column

    def _unreached(self, raw: torch.Tensor) -> torch.Tensor:
        """Where some raw ids [n] are not looked up here: after a reshard, that may be so."""
        routing, number = self._found.routing, self._found.number
        first, end = routing.range_of(number)
        elsewhere = torch.nonzero((raw < first) | (raw >= end)).squeeze(1)  # Mostly none: divisions are slow.
        return elsewhere[routing.shards_of(raw[elsewhere]) != number]

    def _check(self, raw: torch.Tensor, rows: torch.Tensor) -> None:
        """Check a map: raw ids [n] and their local rows [n]."""
        found, first = self._found, self._found.row_offset
        if _is_sound(raw, rows, found.local_rows):
            return
        problem = _problem(raw, rows, found.local_rows, first)
        if problem:
            raise InvalidInput(
                f"managed collision module {found.name!r}: {problem}; it holds rows {first} to "
                f"{first + found.local_rows - 1} of table {found.of!r}"
            )


def id_maps(model: nn.Module) -> list[IdMap]:
    """The maps of all managed collision modules of a model.

    Raises:
        InvalidInput: one cannot be published.
    """
    return [IdMap(found) for found in collision_modules(model)]


def _ranges(found: CollisionModule) -> torch.Tensor:
    """The ranges table of a shard: all zero but for its last row, which raw ids take that are not in the map."""
    rows = torch.from_numpy(np.zeros((found.local_rows, 3), np.int64))  # Memory that nobody touches is not taken.
    rows[-1] = torch.tensor([*found.routing.range_of(found.number), found.row_offset])
    return rows


def _is_sound(raw: torch.Tensor, rows: torch.Tensor, local_rows: int) -> bool:
    """Whether a map that is sorted by raw id has no problem; sorting it to find one takes far longer."""
    taken = torch.zeros(local_rows, dtype=torch.bool, device=rows.device)
    taken[rows[(rows >= 0) & (rows < local_rows)]] = True
    return bool((taken.sum() == len(rows)) & (raw[1:] > raw[:-1]).all())


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
    """Where two of some numbers [n] are equal."""
    ordered, order = torch.sort(numbers, stable=True)
    equal = torch.nonzero(ordered[1:] == ordered[:-1]).view(-1)
    return (int(order[equal[0]]), int(order[equal[0] + 1])) if len(equal) else None


# Which table is marked (None: none), and how many features are looked up in it.
Lookup = tuple[int | None, int]
# The lookups of each kernel, in its order.
Lookups = dict[nn.Module, list[Lookup]]


@dataclass(frozen=True)
class TrackedModel:
    """The tracked part of a model, on this rank.

    Attributes:
        modules: sharded modules by FQN.
        tables: the rows that this rank has of each table.
        replicas: tables of which this rank has a copy that another one tracks.
        lookups: what each kernel looks up.
        alone: the kernels of modules that this rank does not share with others. Their ids are in the memory of the
            trainer's batch, which may be filled anew after backward.
        id_maps: the maps of managed collision whose tables are among these.
        unpublished: what no table holds, and must not change; None where it may.
    """

    modules: dict[str, ShardedEmbeddingModule]
    tables: list[TrackedTable]
    replicas: list[TrackedTable]
    lookups: Lookups
    alone: frozenset[nn.Module]
    id_maps: list[IdMap]
    unpublished: UnpublishedState | None


def tracked_model(model: nn.Module, options: TrackerOptions) -> TrackedModel:
    """The tables of a model that `options` do not leave out.

    Raises:
        InvalidInput: some have rows that cannot be tracked, or nothing is called as one of `fqns_to_skip`.
    """
    modules = dict(sharded_modules(model))
    # Ranks that track no dense tensors are told to skip the same as the one that does.
    skips = options.fqns_to_skip
    found = module_tensors(model, dense=options.dense or bool(skips), fqns_to_skip=skips)
    outside = [tensor for tensor in found if options.dense or tensor.kind is TableKind.EMBEDDING]
    maps = id_maps(model) if options.id_maps else []
    others = [tensor.name for tensor in found] + [table.name for table in _tables_of_maps(maps)]
    _check_skips(modules, others, options)
    check_averages(model)
    kernels, alone = {}, set[nn.Module]()
    for name, module in modules.items():
        _check_tables(name, module, options)
        for kernel in _kernels_wanted(name, module, options):
            check_tracked(name, kernel)
            tables = kernel_tables(name, module, kernel)
            if module._env.world_size == 1:  # Of the sharding group, under 2D parallelism too.
                alone.add(kernel)
            kernels[kernel] = (
                [replace(table, replicated=True) for table in tables] if is_replica(module) else tables
            )
    everything = [table for tables in kernels.values() for table in tables]
    wanted = [table for table in merged(everything) if not is_skipped(table.name, options.fqns_to_skip)]
    wanted += [dense_table(tensor) for tensor in outside if not is_skipped(tensor.name, options.fqns_to_skip)]
    tables = [table for table in wanted if options.replicas or not table.replicated]
    replicas = [table for table in wanted if table not in tables]
    maps = [one for one in maps if any(table.name == one.of for table in tables)]
    tables += [table for table in _tables_of_maps(maps) if not is_skipped(table.name, options.fqns_to_skip)]
    numbers = {table.name: number for number, table in enumerate(tables) if table.fused}
    lookups = {kernel: _lookups(of_kernel, numbers) for kernel, of_kernel in kernels.items()}
    if options.dense:
        check_extra_state(model, options.fqns_to_skip)
    unpublished = UnpublishedState(model, options.fqns_to_skip) if options.dense else None
    return TrackedModel(modules, tables, replicas, lookups, frozenset(alone), maps, unpublished)


def published_tables(model: nn.Module, *, dense: bool, fqns_to_skip: Collection[str] = ()) -> list[TableSpec]:
    """Every table of a model that is not left out, the same on all ranks.

    Args:
        model: the model.
        dense: with parameters and buffers that are no embedding tables.
        fqns_to_skip: those left out (`TrackerOptions.fqns_to_skip`).

    Raises:
        InvalidInput: one cannot be published.
    """
    tables = []
    for name, module in sharded_modules(model):
        for fqn, config in _configs(name, module, fqns_to_skip):
            dtype = table_dtype(fqn, data_type_to_dtype(config.data_type))
            tables.append(TableSpec(fqn, config.num_embeddings, config.embedding_dim, dtype))
    if dense:  # Checked on all ranks, so that none waits for one that has failed.
        check_extra_state(model, fqns_to_skip)
    outside = module_tensors(model, dense=dense, fqns_to_skip=fqns_to_skip)
    tables += [dense_table(tensor).table for tensor in outside if not is_skipped(tensor.name, fqns_to_skip)]
    names = {table.name for table in tables}
    maps = [table for found in collision_modules(model) for table in found.tables if table.of in names]
    return tables + [table for table in maps if not is_skipped(table.name, fqns_to_skip)]


def _tables_of_maps(maps: list[IdMap]) -> list[TrackedTable]:
    return [table for one in maps for table in one.tables]


def _kernels_wanted(name: str, module: ShardedEmbeddingModule, options: TrackerOptions) -> Iterator[Any]:
    for lookup in lookups_of(module):
        for kernel in lookup._emb_modules:
            if not all(is_skipped(fqn, options.fqns_to_skip) for fqn in _kernel_fqns(name, module, kernel)):
                yield kernel


def _lookups(tables: list[TrackedTable], numbers: dict[str, int]) -> list[Lookup]:
    """Shards of columns of one table are looked up with the same ids: only the first one's are marked."""
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
    """FQN and config of each table of a module that is not left out, on whichever ranks its shards are."""
    for config in module._table_name_to_config.values():
        fqn = table_fqn(name, module, config.name)
        if not is_skipped(fqn, fqns_to_skip):
            yield fqn, config


def _check_tables(name: str, module: Any, options: TrackerOptions) -> None:
    for fqn, config in _configs(name, module, options.fqns_to_skip):
        check_settings(fqn, config, module.module_sharding_plan[config.name].compute_kernel)


def _check_skips(modules: dict[str, ShardedEmbeddingModule], others: list[str], options: TrackerOptions) -> None:
    fqns = [fqn for name, module in modules.items() for fqn, _ in _configs(name, module)]
    fqns += others
    for skip in options.fqns_to_skip:
        if not any(is_skipped(fqn, [skip]) for fqn in fqns):
            raise InvalidInput(f"fqns_to_skip: {skip!r} is no table and no part of one; tables: {', '.join(fqns)}")


def _kernel_fqns(name: str, module: ShardedEmbeddingModule, kernel: Any) -> list[str]:
    return [table_fqn(name, module, config.name) for config in kernel._config.embedding_tables]
