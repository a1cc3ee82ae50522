"""Batches on ranks that have different numbers of them."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch.distributed as dist

from deltasync.trainer.distributed.agreement import on_any_rank

Batch = TypeVar("Batch")


class LockstepBatches(Iterator[Batch], Generic[Batch]):
    """This rank's batches, for as long as every rank has one.

    A rank that goes on alone would wait for the others in its next collective for ever. This iterator pauses on
    all ranks once one has no batch; the batches that the others have by then come first when all have some again.
    Costs one small collective per batch, over a group of its own.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Called by all ranks together; so is `next`. An iterator that has ended is asked again each time."""
        self._batches = iter(batches)
        self._next: Batch | None = None
        self._group = dist.new_group(backend="gloo")

    def __next__(self) -> Batch:
        if self._next is None:
            self._next = next(self._batches, None)
        [missing] = on_any_rank([self._next is None], self._group)
        if self._next is None or missing:
            raise StopIteration
        batch, self._next = self._next, None
        return batch
