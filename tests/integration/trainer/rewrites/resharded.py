"""Moving tables between ranks in the middle of a run."""

from typing import Any

import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.modules.embedding_modules import EmbeddingBagCollection


def on_rank(rank: int) -> Any:
    return table_wise(rank=rank, compute_kernel="fused")


def by_columns(*ranks: int) -> Any:
    return column_wise(ranks=list(ranks), compute_kernel="fused")


def reshard(model: DistributedModelParallel, name: str, **moved: Any) -> None:
    """Move tables of a collection; the others stay where they are."""
    tables = model.module.get_submodule(name)._table_name_to_config
    configs = [tables[table] for table in moved]
    ranks = dist.get_world_size()
    changes = construct_module_sharding_plan(
        EmbeddingBagCollection(tables=configs),
        moved,
        EmbeddingBagCollectionSharder(),
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    model.reshard({name: (0.0, changes)}, name)
