"""Sharding the click model over ranks, with one optimizer fused into the tables and one for the rest."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainer.model import ClickModel

# The planner would choose the dense kernel on a CPU; only the fused one trains tables in backward.
_KERNEL = "fused"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Learning rates.

    Attributes:
        table_lr: of the sharded tables (rowwise Adagrad, fused into backward).
        dense_lr: of everything else (Adagrad).
    """

    table_lr: float = 0.05
    dense_lr: float = 0.02


def shard(
    model: ClickModel, options: OptimizerOptions, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model over all ranks of the default process group, and its optimizer."""
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": options.table_lr,
        "eps": 1e-8,
    }
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    distributed = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan(plan={"sparse": _plan(model, sharder, device)}),
        sharders=[sharder],
    )
    rest = dict(in_backward_optimizer_filter(distributed.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=options.dense_lr))
    return distributed, CombinedOptimizer([distributed.fused_optimizer, dense])


def _plan(
    model: ClickModel, sharder: EmbeddingBagCollectionSharder, device: torch.device
) -> EmbeddingModuleShardingPlan:
    """Every sharding type once: rows, whole tables, columns and copies."""
    ranks = dist.get_world_size()
    return construct_module_sharding_plan(
        model.sparse,
        per_param_sharding={
            "user": row_wise(compute_kernel=_KERNEL),
            "item": table_wise(rank=0, compute_kernel=_KERNEL),
            "cross": table_wise(rank=ranks - 1, compute_kernel=_KERNEL),
            "history": column_wise(ranks=[0, ranks - 1], compute_kernel=_KERNEL),
            "hour": data_parallel(),
        },
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
