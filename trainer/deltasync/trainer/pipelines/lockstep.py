"""Batches on ranks that have different numbers of them."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from deltasync.trainer.distributed.agreement import Agreement

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
        self._agreement = Agreement("LockstepBatches", "batch")
        self._count = 0

    def __next__(self) -> Batch:
        if self._next is None:
            self._next = next(self._batches, None)
        self._count += 1
        self._agreement.note(self._count)
        missing = self._agreement.any_of(self._next is None)
        if self._next is None or missing:
            raise StopIteration
        batch, self._next = self._next, None
        return batch
