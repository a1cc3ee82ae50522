"""The ranks of test_published: two replicas of a model are trained, averaged and published.

Arguments: the address of a service, and a folder for what the ranks hold at the end. There is no `assert` here:
TorchRec has to run without them to average on a CPU.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.resharded import by_columns, on_rank
from tests.integration.trainer.torchrec_defects.models import CPU, Model, bag, bags, train
from tests.integration.trainer.tracking.rows import weights
from tests.support.ranks import leave
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from deltasync.trainer.sync import DeltaSync, SyncOptions

TABLES: dict[str, Any] = {
    "whole": on_rank(1),
    "columns": by_columns(0, 1),
    "rows": row_wise(compute_kernel="fused"),
}


class OnCpu(DMPCollection):  # type: ignore[misc]
    """TorchRec averages on GPUs only: its shards are said to lie on those."""

    def _remap_sharding_plan(self, plan: ShardingPlan, *arguments: Any, **named: Any) -> None:
        super()._remap_sharding_plan(plan, *arguments, **named)
        for module in plan.plan.values():
            for sharding in module.values():
                for shard in sharding.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def average(self, tensors: list[torch.Tensor]) -> None:
        """As `dist.ReduceOp.AVG`, which gloo does not have."""
        group = self._ctxs[0].replica_pg
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
            tensor /= dist.get_world_size(group)


def two_of_two_ranks() -> OnCpu:
    model = Model({"bags": bags(*(bag(name, "f", dim=8) for name in TABLES))}, dense=True)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    )
    plan = construct_module_sharding_plan(
        model.get_submodule("bags"), TABLES, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    distributed: OnCpu = OnCpu(
        model,
        device=CPU,
        plan=ShardingPlan(plan={"bags": plan}),
        world_size=4,
        sharding_group_size=2,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
        custom_all_reduce=lambda tensors: distributed.average(tensors),
    )
    return distributed


def main(service: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(1)
    model, rank = two_of_two_ranks(), dist.get_rank()
    options = SyncOptions(service=service, model="clicks", publish_every=2, verify=True)
    with DeltaSync(model, options) as sync:
        for step in range(11):  # The last averages are two steps before the end.
            train(model, f=[(5 * step + 3 * rank) % 16])
            sync.step()
            if step % 3 == 2:
                model.sync()
            torch.save(weights(model), Path(folder, f"rank{rank}.pt"))
        tracked = [table.name for table in sync.tracker.tables]
    Path(folder, f"tracked{rank}.txt").write_text("\n".join(tracked))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
