"""Options of the training pipeline."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checks import check_names, check_positive, check_whole

_AMP_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How an `OnlinePipeline` trains.

    All but `not_ahead`, `custom_model_fwd` and `enqueue_batch_after_forward` must be the same on all ranks.

    Attributes:
        grad_accum: number of micro-batches per optimizer step.
        accumulate_tables: also update fused tables only once per optimizer step, with the gradients of all its
            micro-batches, instead of in the backward of each. Costs one more lookup per optimizer step, and the
            memory of the looked-up ids and of their gradients.
        enable_amp: whether to run forward under autocast.
        amp_dtype: type that autocast computes in: bfloat16 or float16. Float16 uses a grad scaler, because small
            gradients would otherwise become 0, and updates tables as with `accumulate_tables`, after dividing the
            scale out of their gradients.
        loss_scale: initial factor of the loss with float16. Halved whenever a gradient is not finite, doubled
            after 2,000 steps with finite gradients.
        not_ahead: FQNs of modules that only forward may call, never the pipeline ahead of it. Name preprocessing
            modules that change between steps or that change themselves after the first batch, and sharded modules
            that forward does not always call with the same part of the batch. The pipeline raises `Contradiction`
            if it detects such a change: in attributes and buffers, in their first 1,000 container items, and in
            arrays of up to 1,000 numbers. It does not detect changes in other objects, closures and globals; one
            batch may then be preprocessed as before the change.
        custom_model_fwd: function to call with a batch in place of the model; returns (loss, output). It calls the
            model, whose own forward may then return anything. Lookups only run ahead if it calls the model with
            the batch.
        dmp_collection_sync_interval_batches: average tables over the replicas of a `DMPCollection` after the first
            batch and then after every this number of batches; None leaves it to the caller.
        enqueue_batch_after_forward: load the next batch but one, and copy it, after forward instead of before, for
            lookups that use the bus to the host themselves (UVM). If the iterator fails then, `progress` completes
            the current batch, and the next `progress` raises the error.
    """

    grad_accum: int = 1
    accumulate_tables: bool = False
    enable_amp: bool = False
    amp_dtype: torch.dtype = torch.bfloat16
    loss_scale: float = 65_536.0
    not_ahead: Collection[str] = ()
    custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None
    dmp_collection_sync_interval_batches: int | None = 1
    enqueue_batch_after_forward: bool = False

    def __post_init__(self) -> None:
        check_whole("grad_accum", self.grad_accum)
        check_positive("loss_scale", self.loss_scale)
        check_names("not_ahead", self.not_ahead)
        if self.dmp_collection_sync_interval_batches is not None:
            check_whole("dmp_collection_sync_interval_batches", self.dmp_collection_sync_interval_batches)
        if self.amp_dtype not in _AMP_DTYPES:
            raise InvalidInput(f"amp_dtype: {self.amp_dtype}, expected torch.bfloat16 or torch.float16")

    @property
    def of_all_ranks(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        own = ("not_ahead", "custom_model_fwd", "enqueue_batch_after_forward")
        return {name: value for name, value in vars(self).items() if name not in own}

    @property
    def scales_loss(self) -> bool:
        """Whether to scale the loss, because gradients may be too small for their type."""
        return self.enable_amp and self.amp_dtype == torch.float16

    @property
    def defers_tables(self) -> bool:
        """Whether to update fused tables only at the optimizer step."""
        return self.scales_loss or (self.accumulate_tables and self.grad_accum > 1)
