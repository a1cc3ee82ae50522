"""Shards a model over ranks, with one optimizer fused into the tables and another for the rest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

# On a CPU, the planner would choose the dense kernel, but only the fused kernel updates tables in backward.
KERNEL = "fused"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Learning rates."""

    table_lr: float = 0.05  # Of the sharded tables: rowwise Adagrad, fused into backward.
    dense_lr: float = 0.02  # Of all other parameters: Adagrad.


def shard(
    model: nn.Module,
    tables: Mapping[str, ParameterShardingGenerator],
    options: OptimizerOptions,
    device: torch.device,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard a model over all ranks of the default process group; returns it with its optimizer.

    Its tables, whose sharding is given by name, are in direct children of type EmbeddingBagCollection or
    ManagedCollisionEmbeddingBagCollection.
    """
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": options.table_lr, "eps": 1e-8}
    bags = EmbeddingBagCollectionSharder(fused_params=fused)
    sharders = [bags, ManagedCollisionEmbeddingBagCollectionSharder(bags)]
    distributed = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan(plan=_plan(model, tables, sharders, device)),
        sharders=sharders,
    )
    rest = dict(in_backward_optimizer_filter(distributed.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=options.dense_lr))
    return distributed, CombinedOptimizer([distributed.fused_optimizer, dense])


def _plan(
    model: nn.Module,
    tables: Mapping[str, ParameterShardingGenerator],
    sharders: Sequence[BaseEmbeddingSharder[nn.Module]],
    device: torch.device,
) -> dict[str, ModuleShardingPlan]:
    ranks, plan = dist.get_world_size(), {}
    for name, module in model.named_children():
        for sharder in sharders:
            if isinstance(module, sharder.module_type):
                ways = {table: tables[table] for table in sharder.shardable_parameters(module)}
                plan[name] = construct_module_sharding_plan(module, ways, sharder, ranks, ranks, device.type)
    return plan


def click_tables(managed: Iterable[str] = ()) -> dict[str, ParameterShardingGenerator]:
    """The sharding of the click model's tables, with an example of each sharding type.

    The tables named in `managed` are sharded by rows, because TorchRec supports only that for managed collision.
    """
    last = dist.get_world_size() - 1
    ways = {
        "user": row_wise(compute_kernel=KERNEL),
        "item": table_wise(rank=0, compute_kernel=KERNEL),
        "cross": table_wise(rank=last, compute_kernel=KERNEL),
        "history": column_wise(ranks=[0, last], compute_kernel=KERNEL),
        "hour": data_parallel(),
    }
    return ways | {name: row_wise(compute_kernel=KERNEL) for name in managed}
