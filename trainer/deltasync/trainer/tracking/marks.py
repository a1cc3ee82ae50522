"""Lookups whose rows have changed and are not stamped yet."""

import time

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.attachment import Lookups, ids_by_table
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.stamps import STAMP_BYTES, RowStamps

_MOST_BYTES, _MOST_LOOKUPS = 64 << 20, 1024


class LookupMarks:
    """Keeps the ids of lookups, which are not copied, until there is time to sort them out by table.

    Attributes:
        nbytes: of the ids kept.
    """

    def __init__(self, lookups: Lookups, stamps: RowStamps, cost: TrackerCost) -> None:
        self._lookups, self._stamps, self._cost = lookups, stamps, cost
        self._kept: list[tuple[KeyedJaggedTensor, nn.Module]] = []
        self.nbytes = 0

    def knows(self, kernel: nn.Module) -> bool:
        """Whether tables that a kernel looks up are tracked."""
        return kernel in self._lookups

    def add(self, features: KeyedJaggedTensor, kernel: nn.Module) -> None:
        """Keep the ids of a lookup of a kernel."""
        started = time.perf_counter()
        nbytes = features.values().nbytes
        self._kept.append((features, kernel))
        self.nbytes += nbytes
        self._cost.marking_bytes += nbytes
        self._cost.marking_seconds += time.perf_counter() - started
        if self.nbytes > _MOST_BYTES or len(self._kept) > _MOST_LOOKUPS:  # Nobody ends steps or reads.
            self.compact()

    def compact(self) -> None:
        """Stamp the rows that were looked up."""
        if not self._kept:
            return
        started = time.perf_counter()
        for features, kernel in self._kept:
            for number, ids in ids_by_table(self._lookups[kernel], features):
                self._stamps.stamp(number, ids)
                self._cost.compaction_bytes += len(ids) * STAMP_BYTES
        self.clear()
        self._cost.compaction_seconds += time.perf_counter() - started

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()
        self.nbytes = 0
