"""Options of the training pipeline."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

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


WHY_NOT_TAKEN = {
    "execute_all_batches": "every batch that was taken is trained on; reset() drops those in flight",
    "apply_jit": "modules stay what they are, under their names; script or compile them before sharding",
    "context_type": "the pipeline has a context of its own",
    "pipeline_postproc": "all preprocessing that can run ahead does; not_ahead names exceptions",
    "enable_inplace_copy_batch": "a TensorDict has no way to be copied into memory of another stream",
    "async_inplace_copy": "as enable_inplace_copy_batch; besides, batches are copied by the thread that trains",
    "free_features_storage_early": "forward's features are compared with those that were sent out ahead",
    "clear_data_dist_inputs": "it frees memory of the batch, whose features forward is compared with",
    "pipeline": "OnlinePipeline accumulates gradients itself, and raises an error where it is wrapped",
    "config": "grad_accum is its num_steps",
    "is_enabled": "grad_accum=1 accumulates nothing",
    "num_steps": "it is called grad_accum here",
    "num_warmup_steps": "a DDP with a static graph has the one step that it needs",
}
"""The reason for each, as the error and the README give it."""


def refuse(arguments: Iterable[str]) -> NoReturn:
    """Refuse arguments that the pipeline does not support.

    Raises:
        TypeError: always, with the reason for the first argument.
    """
    name = next(iter(arguments))
    if name in {field.name for field in fields(PipelineOptions)}:
        raise TypeError(f"{name} is an option: OnlinePipeline(..., PipelineOptions({name}=...))")
    if name in WHY_NOT_TAKEN:
        raise TypeError(f"OnlinePipeline does not take {name}: {WHY_NOT_TAKEN[name]}")
    raise TypeError(f"OnlinePipeline has no argument {name!r}")
