"""What is updated in backward beside sharded tables, whose updates alone can wait for the optimizer step."""

from collections.abc import Iterator

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modules import modules_outside_of_tables, outside_of_tables

_MARK = "_in_backward_optimizers"  # Of PyTorch, and of TorchRec's `apply_optimizer_in_backward`.


def refuse_backward_updates(model: nn.Module) -> None:
    """Check that no gradient is applied before the scale of the loss is divided out of it.

    Raises:
        InvalidInput: parts of the model would be updated with scaled gradients; it names them.
    """
    found = [*_fused_modules(model), *_parameters_in_backward(model)]
    if found:
        raise InvalidInput(
            f"amp_dtype=torch.float16: {', '.join(found)}: updated in backward, while its gradients are still "
            f"multiplied by the scale of the loss; use torch.bfloat16, which needs no scale, or give it to the "
            f"optimizer, or shard it"
        )


def _fused_modules(model: nn.Module) -> Iterator[str]:
    outermost: list[str] = []
    for name, module in modules_outside_of_tables(model):
        fused = isinstance(module, FusedOptimizerModule | SplitTableBatchedEmbeddingBagsCodegen)
        if fused and not any(f"{name}.".startswith(f"{other}.") for other in outermost):
            outermost.append(name)
            yield f"module {name!r} ({type(module).__name__})"


def _parameters_in_backward(model: nn.Module) -> Iterator[str]:
    for name, parameter in outside_of_tables(model):
        if hasattr(parameter, _MARK):
            yield f"parameter {name!r}"
