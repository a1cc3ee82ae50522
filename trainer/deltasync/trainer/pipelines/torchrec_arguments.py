"""Arguments of TorchRec's pipelines that `OnlinePipeline` does not take."""

from collections.abc import Iterable
from dataclasses import fields
from typing import NoReturn

from deltasync.trainer.pipelines.options import PipelineOptions

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
