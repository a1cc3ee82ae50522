"""Batches of ranks that do not have equally many."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch.distributed as dist

from deltasync.trainer.distributed.agreement import on_any_rank

Batch = TypeVar("Batch")


class LockstepBatches(Iterator[Batch], Generic[Batch]):
    """This rank's batches, for as long as every rank has one.

    A rank that goes on alone waits for the others in its next collective, for ever. Here a batch that others have
    no match for is kept: the iterator pauses on all ranks, and goes on from that batch once all have more.
    Costs one small collective per batch, over a group of its own.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Called by all ranks together; so is `next`. An iterator that has ended is asked again each time."""
        self._batches = iter(batches)
        self._kept: Batch | None = None
        self._group = dist.new_group(backend="gloo")

    def __next__(self) -> Batch:
        if self._kept is None:
            self._kept = next(self._batches, None)
        [missing] = on_any_rank([self._kept is None], self._group)
        if self._kept is None or missing:
            raise StopIteration
        batch, self._kept = self._kept, None
        return batch
