"""Updates fused tables once per optimizer step.

A fused table is normally updated in the backward of its lookup: once per micro-batch, with gradients that still
contain the scale of the loss. This module instead detaches the output of each lookup and keeps its gradient until
the optimizer step. It then looks up the ids of all micro-batches again, together, and runs the gradients through
the backward of that lookup. The table's optimizer sees the same as for one large batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines.lookahead import AttributePatches
from deltasync.trainer.tracking.modules import named_modules, sharded_modules
from deltasync.trainer.tracking.shards import lookups_of


class DeferredTables:
    """The fused tables of a model, with the gradients to apply at the next optimizer step."""

    def __init__(self, model: nn.Module, in_forward: Callable[[], bool]) -> None:
        """Find the lookups of a model, without attaching to them.

        `in_forward` says whether the pipeline is running its forward; other forwards update tables in backward.
        """
        _refuse_undeferrable(model)
        self._model = model
        self._patches = AttributePatches()
        self.in_forward = in_forward
        self.find_lookups()

    def find_lookups(self) -> None:
        """Find the model's lookups again. Nothing may be attached or pending."""
        self._lookups = [
            DeferredLookup(self, f"lookup of module {name!r}", lookup)
            for name, module in sharded_modules(self._model)
            for lookup in lookups_of(module)
            if any(map(_is_fused, _kernels(lookup)))
        ]

    def attach(self) -> None:
        """Start to defer the updates of lookups, in place of any other pipeline that does so."""
        for deferred in self._lookups:
            before = vars(deferred.lookup).get("forward")
            if before is deferred:
                continue
            if isinstance(before, DeferredLookup):
                before.tables.detach()
            self._patches.replace(deferred.lookup, "forward", deferred)

    def detach(self) -> None:
        """Let lookups update their tables in backward again. Keeps the gradients that wait for `apply`."""
        self._patches.undo()

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs of lookups; `apply` uses their `grad`."""
        return [lookup.output for deferred in self._lookups for lookup in deferred.pending]

    def apply(self) -> None:
        """Update the tables with the gradients of all micro-batches."""
        for deferred in self._lookups:
            deferred.apply()

    def clear(self) -> None:
        """Drop the gradients."""
        for deferred in self._lookups:
            deferred.pending.clear()


@dataclass
class _PendingLookup:
    """A lookup whose table is still to be updated, with the gradient of `output`."""

    features: KeyedJaggedTensor
    output: torch.Tensor


class DeferredLookup:
    """Replaces the forward of a lookup, for all its kernels."""

    def __init__(self, tables: DeferredTables, name: str, lookup: Any) -> None:
        self.tables, self._name, self.lookup = tables, name, lookup
        self.pending: list[_PendingLookup] = []

    def __call__(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up the rows without updating the table in backward."""
        if not self.tables.in_forward():
            return self._look_up(sparse_features)
        if not torch.is_grad_enabled():
            with _iterations_preserved(_kernels(self.lookup)):
                return self._look_up(sparse_features)
        reason = why_not_deferred(sparse_features)
        if reason:
            raise InvalidInput(f"{self._name}: {reason}: its tables can't be updated once per step")
        with torch.no_grad(), _iterations_preserved(_kernels(self.lookup)):
            output = self._look_up(sparse_features).detach().requires_grad_()
        self.pending.append(_PendingLookup(_copy(sparse_features), output))
        return output

    def apply(self) -> None:
        """Update the tables with the gradients of all micro-batches, as for one batch."""
        lookups = [lookup for lookup in self.pending if lookup.output.grad is not None]
        self.pending.clear()
        if not lookups:
            return
        for kernel in self.lookup._emb_modules:
            if _is_fused(kernel.emb_module):
                kernel.fused_optimizer.step()  # Passes the current learning rate to the kernel.
        features = [lookup.features for lookup in lookups]
        gradients = [lookup.output.grad for lookup in lookups if lookup.output.grad is not None]
        with torch.enable_grad():
            output = self._look_up(one_batch(features))
        output.backward(self._one_gradient(features, gradients))  # type: ignore[no-untyped-call]

    def _look_up(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        output: torch.Tensor = type(self.lookup).forward(self.lookup, sparse_features)
        return output

    def _one_gradient(self, features: list[KeyedJaggedTensor], gradients: list[torch.Tensor]) -> torch.Tensor:
        if not isinstance(self.lookup, GroupedEmbeddingsLookup):  # [B, sum of dims]
            return torch.cat(gradients)
        # The output is flat, ordered by kernel, then feature, then row.
        dims = [dim for kernel in self.lookup._emb_modules for dim in kernel._config.embedding_dims()]
        sizes = [[n * dim for n, dim in zip(one.length_per_key(), dims, strict=True)] for one in features]
        return _feature_by_feature(gradients, sizes)


def why_not_deferred(features: KeyedJaggedTensor) -> str:
    """The reason why updates for these features cannot be deferred; empty if they can."""
    if features.variable_stride_per_key():
        return f"its features {features.keys()} vary in batch size"
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:
        return f"the weights of its features {features.keys()} are learnt in its backward"
    return ""


def one_batch(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Join batches with the same keys into one, whose stride is the sum of theirs."""
    keys = batches[0].keys()
    lengths = torch.cat([batch.lengths().view(len(keys), -1) for batch in batches], dim=1)
    sizes = [batch.length_per_key() for batch in batches]
    weights = [weights for batch in batches if (weights := batch.weights_or_none()) is not None]
    return KeyedJaggedTensor(
        keys=keys,
        values=_feature_by_feature([batch.values() for batch in batches], sizes),
        weights=_feature_by_feature(weights, sizes) if weights else None,
        lengths=lengths.view(-1),
        stride=lengths.shape[1],
        length_per_key=[sum(of_key) for of_key in zip(*sizes, strict=True)],
    )


def _feature_by_feature(batches: list[torch.Tensor], sizes: list[list[int]]) -> torch.Tensor:
    """Reorder values from [batch][feature] to [feature][batch]; `sizes` are by batch and feature."""
    parts = [torch.split(batch, of_feature) for batch, of_feature in zip(batches, sizes, strict=True)]
    return torch.cat([part for of_feature in zip(*parts, strict=True) for part in of_feature])


def _copy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copy features, because with a single rank they share the batch's memory, which may be reused."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().clone(),
        weights=None if weights is None else weights.clone(),
        lengths=features.lengths().clone(),
        stride=features.stride(),
        length_per_key=features.length_per_key(),
    )


@contextmanager
def _iterations_preserved(kernels: list[Any]) -> Iterator[None]:
    """Restore the kernels' iteration counts, because each forward counts as an iteration of the optimizer."""
    fused = [kernel for kernel in kernels if _is_fused(kernel)]
    before = [(kernel.training, int(kernel.iter_cpu), kernel.iter.clone()) for kernel in fused]
    for kernel in fused:
        kernel.training = False
    try:
        yield
    finally:
        for kernel, (training, on_host, on_device) in zip(fused, before, strict=True):
            kernel.training = training
            kernel.iter_cpu.fill_(on_host)
            kernel.iter.copy_(on_device)


def _kernels(lookup: Any) -> list[Any]:
    return [kernel.emb_module for kernel in lookup._emb_modules]


def _is_fused(kernel: Any) -> bool:
    return isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)


def _refuse_undeferrable(model: nn.Module) -> None:
    """Check all tables of the model, not only those of this rank, because all ranks must raise the error."""
    for name, module in named_modules(model):
        if isinstance(module, ShardedManagedCollisionCollection):
            reason = "gives rows to other ids between micro-batches (managed collision)"
        elif isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            reason = "learns the weights of its features in the lookups' backward (feature processors)"
        else:
            continue
        raise InvalidInput(f"module {name!r} {reason}: its tables can't be updated once per step")
