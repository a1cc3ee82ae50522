"""A rank's share of a model: its rows of each table, and the live tensors to read them from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule

from deltasync.base.arguments import check_type
from deltasync.base.errors import InvalidInput
from deltasync.core.tables import Shard, TableSpec
from deltasync.trainer.tracking.module_tensors import ModuleTensor
from deltasync.trainer.tracking.modules import sharded_modules, table_fqn

_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {torch.float32: np.dtype("<f4"), torch.float16: np.dtype("<f2")}


@dataclass(frozen=True, eq=False)
class TrackedShard:
    """A shard and the live tensors to read it from, which training changes in place."""

    shard: Shard  # Its rows and columns.
    weight: torch.Tensor  # Its values, [rows, cols].
    # States of the fused optimizer, each [rows, cols], or [rows, 1] for one value per row. Empty without a fused
    # optimizer or if it has no states.
    states: Sequence[torch.Tensor] = ()
    # The kernel whose cache has the newest rows, to flush before a read; None without a cache.
    cached_in: Any = None
    cache_offset: int = 0  # The number of the shard's first row in the cache.
    # For a tensor outside sharded modules, its module and attribute, because the model may replace it.
    source: ModuleTensor | None = None


@dataclass(frozen=True, eq=False)
class TrackedTable:
    """A rank's share of a table: one range of rows, in one or more column shards."""

    table: TableSpec  # The table, named as in the model's `state_dict`.
    shards: list[TrackedShard]  # Its shards on this rank, ordered by column.
    features: list[str]  # The features whose ids are looked up in it.
    # Whether only rows that were looked up change, in backward. Otherwise the table is a map, or a dense
    # optimizer may change any row at every step, for example by momentum or weight decay.
    fused: bool
    replicated: bool  # Whether every rank has a copy.

    @property
    def name(self) -> str:
        """The table's FQN."""
        return self.table.name

    @property
    def row_offset(self) -> int:
        """Global id of this rank's first row."""
        return self.shards[0].shard.row_offset

    @property
    def rows(self) -> int:
        """Number of this rank's rows."""
        return self.shards[0].shard.rows

    @property
    def device(self) -> torch.device:
        """The device of this rank's rows."""
        return self.shards[0].weight.device

    @property
    def compared(self) -> bool:
        """Whether reads find changed rows by comparing all rows with copies, because no hook reports them."""
        return not self.fused and not self.table.of

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset and number of each shard's columns."""
        return [(tracked.shard.col_offset, tracked.shard.cols) for tracked in self.shards]

    def local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert global ids ([n], any integer type) to local ids, leaving out rows of other ranks: int64 [m]."""
        check_ids(self.table, ids)
        local = ids.to(self.device, torch.int64) - self.row_offset
        return local[(local >= 0) & (local < self.rows)]


# Without torch's other unsigned integers, which have no operations.
_ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(table: TableSpec, ids: torch.Tensor) -> None:
    """Check that `ids` are global row ids of a table."""
    check_type(f"ids of table {table.name!r}", "ids", ids, torch.Tensor, remedy="torch.tensor(ids)")
    if ids.dim() != 1 or ids.dtype not in _ID_TYPES:
        raise InvalidInput(
            f"table {table.name!r}: ids of shape {list(ids.shape)} and type {ids.dtype}, expected integers [n], "
            "such as torch.int64"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < table.rows:
        raise InvalidInput(
            f"table {table.name!r}: ids from {int(ids.min())} to {int(ids.max())}, "
            f"but it has rows 0 to {table.rows - 1}"
        )


def check_deletable(table: TableSpec) -> None:
    """Check that rows of a table can be deleted."""
    if not table.kind.ranked:
        raise InvalidInput(
            f"table {table.name!r} is of kind {table.kind.value!r}: only rows of embeddings can be deleted"
        )


def dense_table(tensor: ModuleTensor) -> TrackedTable:
    """A parameter, buffer or unsharded table as a tracked table."""
    states = [_matrix(state) for state in tensor.states]
    shard = TrackedShard(Shard.whole(tensor.table), tensor.matrix(), states, source=tensor)
    return TrackedTable(tensor.table, [shard], [], fused=False, replicated=True)


def lookups_of(module: ShardedEmbeddingModule) -> Iterator[Any]:
    """The lookups of a sharded module, one for each sharding type."""
    for wrapped in module._lookups:
        lookup = wrapped
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        yield lookup


def kernel_tables(name: str, module: ShardedEmbeddingModule, kernel: Any) -> list[TrackedTable]:
    """The tables of one kernel of a lookup, in the order of the lookup."""
    weights, states = kernel.split_embedding_weights(), []
    if hasattr(kernel.emb_module, "split_optimizer_states"):
        states = kernel.emb_module.split_optimizer_states()
    states = states or [[]] * len(weights)
    tables = []
    for number, (config, weight) in enumerate(zip(kernel._config.embedding_tables, weights, strict=True)):
        fqn = table_fqn(name, module, config.name)
        table = TableSpec(fqn, config.num_embeddings, config.embedding_dim, table_dtype(fqn, weight.dtype))
        replicated = config.local_metadata is None
        row_offset, col_offset = (0, 0) if replicated else config.local_metadata.shard_offsets
        shard = Shard(table, row_offset, config.local_rows, col_offset, config.local_cols)
        of_shard = [_matrix(state.detach()) for state in states[number]]
        tracked = TrackedShard(shard, weight.detach(), of_shard, *_cache(kernel, number))
        fused = kernel._config.compute_kernel is not EmbeddingComputeKernel.DENSE
        tables.append(TrackedTable(table, [tracked], config.feature_names, fused, replicated))
    return tables


def _cache(kernel: Any, table: int) -> tuple[Any, int]:
    """The kernel, and the number of a table's first row in its cache; None and 0 if the table has no cache."""
    config, emb_module = kernel._config.embedding_tables[table], kernel.emb_module
    # The kernel's own config says FUSED, because TorchRec joins tables with and without a cache in one kernel.
    cached = config.compute_kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING
    if not cached or not emb_module.lxu_cache_weights.numel():  # On a CPU there is no cache.
        return None, 0
    feature = emb_module.feature_table_map.index(table)
    return kernel, int(emb_module.cache_hash_size_cumsum[feature])


def _matrix(state: torch.Tensor) -> torch.Tensor:
    return state if state.dim() > 1 else state.unsqueeze(1)


def merged(tables: list[TrackedTable]) -> list[TrackedTable]:
    """Join the column shards of each table, given as one `TrackedTable` per shard."""
    by_name: dict[str, TrackedTable] = {}
    for table in tables:
        first = by_name.setdefault(table.name, table)
        if first is table:
            continue
        if (first.row_offset, first.rows) != (table.row_offset, table.rows):
            first_rows, rows = (f"{of.row_offset}-{of.row_offset + of.rows}" for of in (first, table))
            raise InvalidInput(f"this rank has rows {first_rows} and {rows} of {table.name}: expected one range")
        shards = sorted(first.shards + table.shards, key=lambda tracked: tracked.shard.col_offset)
        by_name[table.name] = replace(first, shards=shards)
    return list(by_name.values())


def flush_caches(tables: Sequence[TrackedTable]) -> None:
    """Write the newest rows back from the caches of all kernels."""
    kernels = _kernels_with_cache(tables)
    if not kernels:
        return
    torch.cuda.synchronize()  # Here and after, because lookups and prefetches fill caches on other streams.
    for kernel in kernels:
        kernel.flush()
    torch.cuda.synchronize()


def drop_caches(tables: Sequence[TrackedTable]) -> None:
    """Empty the caches of all kernels, whose rows have been overwritten outside them since `flush_caches`."""
    for kernel in _kernels_with_cache(tables):
        kernel.emb_module.reset_cache_states()


def _kernels_with_cache(tables: Sequence[TrackedTable]) -> set[Any]:
    return {tracked.cached_in for table in tables for tracked in table.shards if tracked.cached_in}


def follow_replaced(tables: Sequence[TrackedTable]) -> None:
    """Switch to the new tensors where the model has replaced a tensor."""
    for table in tables:
        for tracked in table.shards:
            if tracked.source:
                tracked.weight.data = tracked.source.matrix()


def table_dtype(name: str, dtype: torch.dtype) -> np.dtype[np.generic]:
    """The type of an embedding table's values."""
    if dtype not in _DTYPES:
        raise InvalidInput(f"table {name!r}: weights of type {dtype}, expected float32 or float16")
    return _DTYPES[dtype]


# -- resets, for the training thread between steps. They write through `Tensor.data`: a pipeline may already have
# looked up rows for a later backward, and autograd would refuse weights that have changed since.


def reset_rows(table: TrackedTable, ids: torch.Tensor) -> None:
    """Set rows (local ids, int64 [n]) of a table and their fused optimizer states to zero."""
    for tracked in table.shards:
        tracked.weight.data.index_fill_(0, ids, 0)
        for state in tracked.states:
            state.data.index_fill_(0, ids, 0)
        if tracked.cached_in:
            # Also in the cache, or a flush would write the old values back. Rows keep their places in it, which
            # a prefetch may already have recorded for the next step.
            if ids.is_cuda:
                torch.cuda.synchronize()  # Prefetches fill the cache on other streams.
            emb_module = tracked.cached_in.emb_module
            places = torch.isin(emb_module.lxu_cache_state.flatten(), ids + tracked.cache_offset)
            emb_module.lxu_cache_weights.data.index_fill_(0, torch.nonzero(places).squeeze(1), 0)


class DenseOptimizers:
    """Finds the optimizers of this process that have stepped since `listen`, to reset their states for rows."""

    def __init__(self) -> None:
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def listen(self) -> Callable[[], None]:
        """Start to record optimizers when they step. Returns a function that stops this."""
        return register_optimizer_step_post_hook(self._note).remove

    def reset(self, weight: torch.Tensor, ids: torch.Tensor) -> None:
        """Reset the optimizer states of rows (int64 [n]) of a table to their initial values."""
        for optimizer in list(self._stepped):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, state in _state_rows(weight, parameter, optimizer.state.get(parameter, {})):
                        # Adagrad's sum is the only state that may have an initial value other than zero.
                        first = group.get("initial_accumulator_value", 0) if key == "sum" else 0
                        state.data.index_fill_(0, ids, first)

    def _note(self, optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        self._stepped.add(optimizer)


def _state_rows(
    weight: torch.Tensor, parameter: torch.Tensor, states: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """The states of a parameter by key, as rows of a table in its memory; empty if the table is elsewhere."""
    start = weight.storage_offset() - parameter.storage_offset()
    same_memory = weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    if not same_memory or not 0 <= start <= parameter.numel() - weight.numel():
        return []
    whole = weight.numel() == parameter.numel()
    states_by_row = []
    for key, state in states.items():
        if not isinstance(state, torch.Tensor):
            continue
        if state.numel() == parameter.numel():
            states_by_row.append((key, state.view(-1)[start : start + weight.numel()].view(len(weight), -1)))
        elif whole and state.numel() == len(weight):  # One value per row.
            states_by_row.append((key, state.view(-1, 1)))
    return states_by_row


def evict_on_cpu(model: nn.Module) -> None:
    """Let managed collision evict rows of fused tables on a CPU, as on a GPU.

    TorchRec resets evicted rows with an FBGEMM operation that does not exist for CPUs. This gives each fused
    kernel on a CPU a replacement that does the same; a second call changes nothing. TorchRec initialises the rows
    again afterwards.
    """
    for _, module in sharded_modules(model):
        for lookup in lookups_of(module):
            for kernel in lookup._emb_modules:
                emb_module = kernel.emb_module
                if isinstance(emb_module, SplitTableBatchedEmbeddingBagsCodegen) and emb_module.use_cpu:
                    emb_module.reset_embedding_weight_momentum = partial(_reset_evicted, emb_module)


def _reset_evicted(
    emb_module: Any,
    pruned_indices: torch.Tensor,
    pruned_indices_offsets: torch.Tensor,
    logical_table_ids: torch.Tensor,
    buffer_ids: torch.Tensor,
) -> None:
    """Do what FBGEMM does on a GPU: with row-wise Adagrad, set rows and momentum to zero; otherwise nothing."""
    if emb_module.optimizer is EmbOptimType.NONE:
        raise InvalidInput("rows of a kernel without an optimizer cannot be evicted")
    if emb_module.optimizer is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return
    weights, states = emb_module.split_embedding_weights(), emb_module.split_optimizer_states()
    for table, number in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        ids = pruned_indices[pruned_indices_offsets[number] : pruned_indices_offsets[number + 1]]
        weights[table].data.index_fill_(0, ids, 0)
        states[table][0].data.index_fill_(0, ids, 0)
