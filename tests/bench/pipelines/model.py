"""What the pipeline benchmark trains: bags of rows, dense features, and layers over both."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.pipelines.options import Sizes
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import ParameterShardingGenerator, row_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.trainer.distributed.sharding import KERNEL, OptimizerOptions, shard

Output = tuple[torch.Tensor, torch.Tensor]


def table_names(sizes: Sizes) -> list[str]:
    """Of the tables, and of the features looked up in them."""
    return [f"t{number}" for number in range(sizes.tables)]


class BagModel(nn.Module):
    """Predicts labels; of a `Batch`."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=sizes.rows, embedding_dim=sizes.dim, feature_names=[name])
            for name in table_names(sizes)
        ]
        self.sparse = EmbeddingBagCollection(tables=tables, device=device)
        self.bottom = _layers(device, sizes.dense, sizes.over, sizes.dim)
        self.top = _layers(device, (sizes.tables + 1) * sizes.dim, sizes.over, sizes.over, 1)

    def loss(self, features: Any, dense: torch.Tensor, label: torch.Tensor) -> Output:
        """Of what is looked up, for pipelines; and the same to look at."""
        inputs = torch.cat([self.sparse(features).values(), self.bottom(dense)], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.top(inputs).squeeze(1), label)
        return loss, loss.detach()

    def forward(self, batch: Any) -> Output:
        return self.loss(batch.sparse, batch.dense, batch.label)


class TensorDictModel(BagModel):
    """The same, of a TensorDict."""

    def forward(self, batch: Any) -> Output:
        return self.loss(batch, batch["dense"], batch["label"])


def sharded(
    kind: type[BagModel], sizes: Sizes, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A model over all ranks, and its optimizer. All kinds begin with the same values."""
    torch.manual_seed(0)
    return shard(kind(sizes, torch.device("meta")), _tables(sizes), OptimizerOptions(), device)


def _tables(sizes: Sizes) -> dict[str, ParameterShardingGenerator]:
    """Each fourth table by rows, the others whole, one rank after the other."""
    ranks = dist.get_world_size()
    return {
        name: row_wise(compute_kernel=KERNEL)
        if number % 4 == 3
        else table_wise(rank=number % ranks, compute_kernel=KERNEL)
        for number, name in enumerate(table_names(sizes))
    }


def _layers(device: torch.device, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, device=device), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
