"""What the tracker benchmark trains: one table, looked up row by row, with ids as skewed as people's clicks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DIM, IDS_PER_SAMPLE = 64, 50


class RowModel(nn.Module):
    """An `EmbeddingCollection` of one table, and a linear layer over each row looked up."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        meta = torch.device("meta")
        table = EmbeddingConfig(name="table", num_embeddings=rows, embedding_dim=DIM, feature_names=["ids"])
        self.sparse = EmbeddingCollection(tables=[table], device=meta)
        self.dense = nn.Linear(DIM, 1, device=meta)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.dense(self.sparse(sparse)["ids"].values()).pow(2).mean()
        return loss


class Training:
    """Real training steps of a sharded `RowModel`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        model = RowModel(rows)
        sharder = EmbeddingCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        )
        plan = construct_module_sharding_plan(
            model.sparse,
            {"table": table_wise(rank=0, compute_kernel="fused")},
            sharder,
            local_size=1,
            world_size=1,
            device_type=device.type,
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=ShardingPlan(plan={"sparse": plan}),
            sharders=[sharder],
        )
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        self._optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def step(self, batch: KeyedJaggedTensor) -> None:
        self._optimizer.zero_grad()
        self.model(batch).backward()
        self._optimizer.step()


def batches(rows: int, ids: int, skew: float, device: torch.device) -> Iterator[KeyedJaggedTensor]:
    """Batches without end of `ids` ids of a table of `rows` rows.

    The r-th most popular row is drawn with a probability of about r^-skew; where it lies is left to chance.
    """
    generator = torch.Generator().manual_seed(0)
    by_popularity = torch.randperm(rows, generator=generator)
    lengths = torch.full((ids // IDS_PER_SAMPLE,), IDS_PER_SAMPLE)
    while True:
        uniform = torch.rand(ids, generator=generator, dtype=torch.float64)
        values = by_popularity[_ranks(uniform, rows, skew)]
        yield KeyedJaggedTensor(keys=["ids"], values=values, lengths=lengths).to(device)


def _ranks(uniform: torch.Tensor, rows: int, skew: float) -> torch.Tensor:
    """Ranks from 0 by the inverse of the integral of (rank + 1)^-skew, whose sum has none in closed form."""
    flat = 1.0 - skew
    drawn = (((rows + 1) ** flat - 1) * uniform + 1) ** (1 / flat)
    ranks: torch.Tensor = (drawn.long() - 1).clamp_(0, rows - 1)
    return ranks
