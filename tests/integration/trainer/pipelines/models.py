"""Models of bags "bags" with tables "f" and "g", over Batch."""

from typing import Any

import torch
from tests.integration.trainer.pipelines.batches import WIDTH, Batch
from tests.integration.trainer.torchrec_defects.models import DIM, bags
from torch import nn
from torchrec.distributed.sharding_plan import row_wise, table_wise

BOTH_RANKS = {"f": table_wise(rank=1, compute_kernel="fused"), "g": row_wise(compute_kernel="fused")}


class Regression(nn.Module):
    """Predicts labels from dense values and looked-up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags("f", "g")
        self.over = nn.Linear(2 * DIM + WIDTH, 1)

    def looked_up(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self.bags(batch.sparse).values()
        return found

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.over(torch.cat([self.looked_up(batch), batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, batch.label)
        return loss, loss.detach()
