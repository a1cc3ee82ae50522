"""Resets rows and their optimizer states, for deletes and for evictions of managed collision on a CPU.

For the training thread, between steps. Writes go through `Tensor.data`: a pipeline may already have looked up rows
for a later backward, and autograd would refuse weights that have changed since.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable, lookups_of


def reset_rows(table: TrackedTable, ids: torch.Tensor) -> None:
    """Set rows (local ids, int64 [n]) of a table and their fused optimizer states to zero."""
    for tracked in table.shards:
        tracked.weight.data.index_fill_(0, ids, 0)
        for state in tracked.states:
            state.data.index_fill_(0, ids, 0)
        if tracked.cached_in:
            _reset_cached(tracked, ids)


def _reset_cached(tracked: TrackedShard, ids: torch.Tensor) -> None:
    """Set rows to zero in a kernel's cache too, or a flush would write their old values back.

    They keep their places in the cache, which a prefetch may already have recorded for the next step.
    """
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
