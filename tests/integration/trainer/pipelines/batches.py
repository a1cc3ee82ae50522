"""Batches of features "f" and "g", dense values and labels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import FieldsBatch

ROWS, WIDTH = 16, 3


@dataclass
class Batch(FieldsBatch):
    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor


def batches(count: int, size: int = 4, seed: int = 0) -> Iterator[Batch]:
    """This rank's: others have other ones."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        lengths = torch.randint(0, 3, (2 * size,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        yield Batch(
            sparse=KeyedJaggedTensor(["f", "g"], ids, lengths=lengths),
            dense=torch.randn(size, WIDTH, generator=generator),
            label=torch.randn(size, generator=generator),
        )
