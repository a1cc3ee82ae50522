"""Mixed precision: autocast around forward, and a grad scaler for float16."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from deltasync.base.errors import InvalidInput
from deltasync.trainer.distributed.ranks import group_of
from deltasync.trainer.pipelines.deferred_tables import DeferredTables
from deltasync.trainer.pipelines.options import PipelineOptions
from deltasync.trainer.tracking.modules import modules_outside_of_tables, outside_of_tables


def autocast(options: PipelineOptions, device: torch.device) -> AbstractContextManager[Any]:
    """The context to run forward in: autocast, or one that does nothing."""
    return torch.autocast(device.type, dtype=options.amp_dtype) if options.enable_amp else nullcontext()


class Step:
    """An optimizer step of parameters and deferred tables together.

    It looks like one optimizer to a grad scaler, which then finds all scaled gradients in one place.
    """

    def __init__(self, optimizer: KeyedOptimizer | torch.optim.Optimizer, tables: DeferredTables | None) -> None:
        self._optimizer, self._tables = optimizer, tables

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All tensors that have a gradient, in one group."""
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        # The parameters include fused tables as whole sharded tensors, which have no gradients.
        own = [parameter for parameter in parameters if not isinstance(parameter, ShardedTensor)]
        outputs = self._tables.outputs if self._tables else []
        return [{"params": [p for p in (*own, *outputs) if p.grad is not None]}]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of all tensors in `param_groups`."""
        return [parameter.grad for parameter in self.param_groups[0]["params"]]

    def step(self) -> None:
        """Update tables and parameters."""
        if self._tables:
            self._tables.apply()
        self._optimizer.step()

    def forget(self) -> None:
        """Drop the gradients of tables; the next `zero_grad` drops those of parameters."""
        if self._tables:
            self._tables.clear()


class LossScale(ShardedGradScaler):
    """Multiplies the loss by a scale, and divides all gradients by it before the optimizer step.

    If a gradient is not finite on one rank, all ranks skip the step, for tables too.
    After "Mixed Precision Training" (Micikevicius et al., 2018).
    """

    def __init__(self, initial: float, model: nn.Module, device: torch.device) -> None:
        super().__init__(device.type, init_scale=initial, process_group=group_of(model))

    def take(self, step: Step, prepare: Callable[[], None]) -> None:
        """Unscale the gradients, call `prepare`, take the step if all are finite, and choose the next scale."""
        self.unscale_(step)  # type: ignore[arg-type]
        prepare()
        self.step(step)  # type: ignore[arg-type]
        step.forget()
        self.update()

    def forget_step(self) -> None:
        """Forget that gradients of a failed step were already unscaled."""
        self._per_optimizer_states.clear()


_MARK = "_in_backward_optimizers"  # Set by `apply_optimizer_in_backward`, in PyTorch and in TorchRec.


def refuse_backward_updates(model: nn.Module) -> None:
    """Check that no part of the model is updated in backward, with scaled gradients."""
    modules: dict[str, str] = {}
    for name, module in modules_outside_of_tables(model):
        fused = isinstance(module, FusedOptimizerModule | SplitTableBatchedEmbeddingBagsCodegen)
        if fused and not any(f"{name}.".startswith(f"{other}.") for other in modules):
            modules[name] = f"module {name!r} ({type(module).__name__})"
    parameters = (f"parameter {name!r}" for name, one in outside_of_tables(model) if hasattr(one, _MARK))
    if updated := [*modules.values(), *parameters]:
        raise InvalidInput(
            f"amp_dtype=torch.float16: {', '.join(updated)}: updated in backward, while its gradients are still "
            f"multiplied by the scale of the loss; use torch.bfloat16, which needs no scale, or pass it to the "
            f"optimizer, or shard it"
        )
