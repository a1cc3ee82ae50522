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
        grad_accum: micro-batches of one optimizer step.
        accumulate_tables: fused tables are updated once per optimizer step too, with the gradients of all its
            micro-batches, instead of in the backward of each. Costs one lookup more per optimizer step, and the
            memory of the looked-up ids and of their gradients.
        enable_amp: run forward under autocast.
        amp_dtype: what autocast computes in: bfloat16, or float16 with a grad scaler, without which small
            gradients would become 0. With float16, tables are updated as with `accumulate_tables`, after the scale
            is divided out of their gradients.
        loss_scale: factor of the loss at first, with float16. Halved whenever gradients are not finite, doubled
            after 2,000 steps in which they were.
        not_ahead: FQNs of modules that are only called by forward, never ahead of it: preprocessing, or sharded
            modules whose features are another part of the batch in some forwards. Name preprocessing that others
            change between steps, and preprocessing that changes itself, if not with the first batch. Such a change
            raises `Contradiction` where it is seen: in attributes and buffers, in the first 1,000 items of
            containers among them, and in arrays of up to 1,000. It is not seen in objects of other kinds, closures
            and globals: the result of one batch may then come from before the change.
        custom_model_fwd: called with a batch in the place of the model; returns (loss, output). It calls the
            model, whose own forward may then return anything. Lookups are done ahead if it calls the model with
            the batch.
        dmp_collection_sync_interval_batches: average tables over the replicas of a `DMPCollection` after the first
            batch, and then each time after this number; None leaves it to the caller.
        enqueue_batch_after_forward: take the next batch but one, and copy it, once forward has run instead of
            before, for lookups that need the bus to the host themselves (UVM). If the iterator then fails, the
            next `progress` raises its error, and this one goes on.
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
        """The options that must be the same on all ranks. They agree on what is done ahead when they attach."""
        own = ("not_ahead", "custom_model_fwd", "enqueue_batch_after_forward")
        return {name: value for name, value in vars(self).items() if name not in own}

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled up, for gradients too small for their type."""
        return self.enable_amp and self.amp_dtype == torch.float16

    @property
    def defers_tables(self) -> bool:
        """Whether the gradients of fused tables are kept until the optimizer step."""
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
    """Refuse arguments that the pipeline does not have.

    Raises:
        TypeError: always, with the reason for the first.
    """
    name = next(iter(arguments))
    if name in {field.name for field in fields(PipelineOptions)}:
        raise TypeError(f"{name} is an option: OnlinePipeline(..., PipelineOptions({name}=...))")
    if name in WHY_NOT_TAKEN:
        raise TypeError(f"OnlinePipeline does not take {name}: {WHY_NOT_TAKEN[name]}")
    raise TypeError(f"OnlinePipeline has no argument {name!r}")
