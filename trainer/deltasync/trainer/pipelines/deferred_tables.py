"""Updating fused tables once per optimizer step.

A fused table is updated in the backward of its lookup, with whatever gradient arrives: that of each micro-batch by
itself, and scaled where the loss is. Here a lookup's output is cut off from the lookup. Its gradients are kept
until the optimizer step. Then the ids of all micro-batches are looked up once more, together, and what was kept
runs through that lookup's backward: the table's optimizer sees what it would see of one large batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines.patches import AttributePatches
from deltasync.trainer.tracking.modules import named_modules, sharded_modules
from deltasync.trainer.tracking.shards import lookups_of


class ForwardState(Protocol):
    """Whether a pipeline's forward runs."""

    in_forward: bool


class DeferredTables:
    """The fused tables of a model, whose gradients are kept until they are applied."""

    def __init__(self, model: nn.Module, pipeline: "ForwardState") -> None:
        """Attach to nothing yet.

        Args:
            model: whose tables they are.
            pipeline: knows whether a pipeline's forward runs; other forwards update their tables in backward.

        Raises:
            InvalidInput: a table's gradients cannot be kept.
        """
        _refuse_undeferrable(model)
        self._model = model
        self._patches = AttributePatches()
        self.pipeline = pipeline
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
        """Keep the gradients of lookups from now on; another pipeline that kept them no longer does."""
        for deferred in self._lookups:
            before = vars(deferred.lookup).get("forward")
            if before is deferred:
                continue
            if isinstance(before, DeferredLookup):
                before.tables.detach()
            self._patches.replace(deferred.lookup, "forward", deferred)

    def detach(self) -> None:
        """Let lookups update their tables in backward again. Gradients that were kept stay."""
        self._patches.undo()

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs of lookups whose gradients, `grad`, `apply` uses."""
        return [lookup.output for deferred in self._lookups for lookup in deferred.pending]

    def apply(self) -> None:
        """Update the tables with all gradients kept."""
        for deferred in self._lookups:
            deferred.apply()

    def clear(self) -> None:
        """Forget the gradients."""
        for deferred in self._lookups:
            deferred.pending.clear()


@dataclass
class _PendingLookup:
    """A lookup whose table is not updated yet; the gradient is that of its output."""

    features: KeyedJaggedTensor
    output: torch.Tensor


class DeferredLookup:
    """Stands in for the forward of a lookup over all of its kernels."""

    def __init__(self, tables: DeferredTables, name: str, lookup: Any) -> None:
        self.tables, self._name, self.lookup = tables, name, lookup
        self.pending: list[_PendingLookup] = []

    def __call__(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up, and leave the table's update for later.

        Raises:
            InvalidInput: the gradients of these features cannot be kept.
        """
        if not self.tables.pipeline.in_forward:
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
        """Update the tables with the kept gradients, as if of one batch."""
        lookups = [lookup for lookup in self.pending if lookup.output.grad is not None]
        self.pending.clear()
        if not lookups:
            return
        for kernel in self.lookup._emb_modules:
            if _is_fused(kernel.emb_module):
                kernel.fused_optimizer.step()  # Hands the current learning rate to the kernel.
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
        # One value after the other: kernel by kernel, feature by feature, row by row.
        dims = [dim for kernel in self.lookup._emb_modules for dim in kernel._config.embedding_dims()]
        sizes = [[n * dim for n, dim in zip(one.length_per_key(), dims, strict=True)] for one in features]
        return _feature_by_feature(gradients, sizes)


def why_not_deferred(features: KeyedJaggedTensor) -> str:
    """Why the gradients of a lookup with these features cannot be kept; empty if they can."""
    if features.variable_stride_per_key():
        return f"its features {features.keys()} vary in batch size"
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:
        return f"the weights of its features {features.keys()} are learnt in its backward"
    return ""


def one_batch(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Batches of the same keys as one, whose stride is the sum of theirs."""
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
    """[batch][feature] -> [feature][batch], `sizes` has the number of values by batch and feature."""
    parts = [torch.split(batch, of_feature) for batch, of_feature in zip(batches, sizes, strict=True)]
    return torch.cat([part for of_feature in zip(*parts, strict=True) for part in of_feature])


def _copy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy of features: where there is one rank only they share the batch's memory, which may be reused."""
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
    """Keep the count of iterations: a kernel's forward counts as an iteration of its optimizer."""
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
    """Check all tables of the model on every rank, so that all ranks raise the error."""
    for name, module in named_modules(model):
        if isinstance(module, ShardedManagedCollisionCollection):
            reason = "gives rows to other ids between micro-batches (managed collision)"
        elif isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            reason = "learns the weights of its features in the lookups' backward (feature processors)"
        else:
            continue
        raise InvalidInput(f"module {name!r} {reason}: its tables can't be updated once per step")
