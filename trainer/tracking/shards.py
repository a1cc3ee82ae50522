"""What a rank holds of a model: shards of tables, and dense parameters as small tables of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import data_type_to_dtype

from sync_service.errors import InvalidInput
from sync_service.tables import Shard, Table

_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {torch.float32: np.dtype("<f4"), torch.float16: np.dtype("<f2")}

_TRACKED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
# Kernels whose weights can be read where they lie. Those with a cache would need it written back first.
_KERNELS = (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED_UVM)


@dataclass(frozen=True, eq=False)
class TrackedShard:
    """A shard, and the live weights it is read from.

    Attributes:
        shard: which rows and columns of which table these are.
        weight: [rows, cols] view of the weights; it stays valid as training changes them.
        fused: only rows that were looked up change, in backward. The rows of other shards belong to a dense
            optimizer, which may change any of them at every step (momentum, weight decay).
        replicated: every rank holds the same.
    """

    shard: Shard
    weight: torch.Tensor
    fused: bool
    replicated: bool


@dataclass(frozen=True, eq=False)
class TrackedLookup:
    """One group of shards that TorchRec looks up at once.

    Attributes:
        kernel: the module that does it, as TorchRec's hook names it.
        shards: the shards in its order, each with its number of features.
    """

    kernel: nn.Module
    shards: list[tuple[TrackedShard, int]]


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, ShardedEmbeddingModule]]:
    """Every sharded embedding module of a model and its name, as in the unsharded model's state_dict.

    Raises:
        InvalidInput: the model has tables in a sharded module of a kind whose rows cannot be tracked.
    """
    for name, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, _TRACKED):
            yield name, module
        elif isinstance(module, ShardedModule) and not any(isinstance(m, _TRACKED) for m in module.modules()):
            raise InvalidInput(f"module {name!r} is a {type(module).__name__}, whose rows cannot be tracked yet")


def tables_of(model: nn.Module, *, dense: bool) -> list[Table]:
    """Every table of a model, the same on all ranks; with `dense`, the parameters outside of them too."""
    tables = []
    for name, module in sharded_modules(model):
        for config in module._table_name_to_config.values():
            table = _table_name(name, module, config.name)
            dtype = _dtype(table, data_type_to_dtype(config.data_type))
            tables.append(Table(table, config.num_embeddings, config.embedding_dim, dtype))
    return tables + [tracked.shard.table for tracked in dense_shards(model) if dense]


def lookups_of(name: str, module: ShardedEmbeddingModule) -> Iterator[tuple[nn.Module, list[TrackedLookup]]]:
    """The lookups of a sharded module, and what each looks up on this rank."""
    for wrapped in module._lookups:
        lookup = wrapped
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        yield lookup, [_tracked_lookup(name, module, kernel) for kernel in lookup._emb_modules]


def dense_shards(model: nn.Module) -> list[TrackedShard]:
    """Every parameter outside of embedding tables, as a table: a matrix by its rows, a vector as one row."""
    sharded = [name for name, m in get_unwrapped_module(model).named_modules() if isinstance(m, ShardedModule)]
    tables = tuple(f"{name}." if name else "" for name in sharded)
    found = []
    for name, parameter in get_unwrapped_module(model).named_parameters():
        if not name.startswith(tables):
            weight = parameter.detach()
            weight = weight.view(weight.shape[0], -1) if weight.dim() > 1 else weight.view(1, -1)
            table = Table(name, weight.shape[0], weight.shape[1], _dtype(name, weight.dtype))
            found.append(TrackedShard(Shard.whole(table), weight, fused=False, replicated=True))
    return found


def _table_name(name: str, module: ShardedEmbeddingModule, table: str) -> str:
    kind = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
    return ".".join(part for part in (name, kind, table) if part)


def _tracked_lookup(name: str, module: ShardedEmbeddingModule, kernel: Any) -> TrackedLookup:
    weights = kernel.split_embedding_weights()
    if kernel._config.compute_kernel not in _KERNELS:
        raise InvalidInput(
            f"module {name!r}: the rows of kernel {kernel._config.compute_kernel.value!r} cannot be read as they "
            f"are; use one of: {', '.join(known.value for known in _KERNELS)}"
        )
    shards = []
    for config, weight in zip(kernel._config.embedding_tables, weights, strict=True):
        table_name = _table_name(name, module, config.name)
        table = Table(table_name, config.num_embeddings, config.embedding_dim, _dtype(table_name, weight.dtype))
        replicated = config.local_metadata is None
        row_offset, col_offset = (0, 0) if replicated else config.local_metadata.shard_offsets
        shard = Shard(table, row_offset, config.local_rows, col_offset, config.local_cols)
        fused = kernel._config.compute_kernel is not EmbeddingComputeKernel.DENSE
        tracked = TrackedShard(shard, weight.detach(), fused=fused, replicated=replicated)
        shards.append((tracked, len(config.feature_names)))
    return TrackedLookup(kernel, shards)


def _dtype(name: str, dtype: torch.dtype) -> np.dtype[np.generic]:
    if dtype not in _DTYPES:
        raise InvalidInput(f"table {name!r}: weights of type {dtype}, expected float32 or float16")
    return _DTYPES[dtype]
