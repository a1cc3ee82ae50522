"""Resetting rows and what the optimizer keeps of them: deletes, and evictions of managed collision on a CPU.

On the thread that trains, between steps. Writes go through `Tensor.data`: a pipeline may have looked rows up
already whose backward is still to come, and autograd refuses weights that it sees change in between.
"""

from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable, lookups_of


def reset_rows(table: TrackedTable, ids: torch.Tensor) -> None:
    """Make rows of this rank's share of a table zeros, and the fused optimizer's state zeros too, as of new rows.

    Args:
        table: the table.
        ids: local row ids, int64 [n], on the table's device.
    """
    for tracked in table.shards:
        tracked.weight.data.index_fill_(0, ids, 0)
        for state in tracked.states:
            state.data.index_fill_(0, ids, 0)
        if tracked.cached_in:
            _reset_cached(tracked, ids)


def _reset_cached(tracked: TrackedShard, ids: torch.Tensor) -> None:
    """The rows that are in a kernel's cache are reset there too: a flush writes zeros over zeros.

    Their places in the cache stay theirs, since a prefetch may have noted them for the next step.
    """
    if ids.is_cuda:
        torch.cuda.synchronize()  # Prefetches fill the cache from streams of their own.
    emb_module = tracked.cached_in.emb_module
    places = torch.isin(emb_module.lxu_cache_state.flatten(), ids + tracked.cache_offset)
    emb_module.lxu_cache_weights.data.index_fill_(0, torch.nonzero(places).squeeze(1), 0)


def evict_on_cpu(model: nn.Module) -> None:
    """Have managed collision evict rows of fused tables on a CPU, as it does on a GPU.

    TorchRec resets evicted rows by an operation of FBGEMM that does not exist for CPUs. Each fused kernel of the
    model that is on a CPU gets one in its place that does the same; doing it again changes nothing. TorchRec gives
    the rows new first values afterwards.

    Args:
        model: a model under `DistributedModelParallel`.
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
    """As FBGEMM on a GPU: rows and momentum become zero where that is row-wise Adagrad's, else nothing does."""
    if emb_module.optimizer is EmbOptimType.NONE:
        raise InvalidInput("rows of a kernel without an optimizer cannot be evicted")
    if emb_module.optimizer is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return
    weights, states = emb_module.split_embedding_weights(), emb_module.split_optimizer_states()
    for table, number in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        ids = pruned_indices[pruned_indices_offsets[number] : pruned_indices_offsets[number + 1]]
        weights[table].data.index_fill_(0, ids, 0)
        states[table][0].data.index_fill_(0, ids, 0)
