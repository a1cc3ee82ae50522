"""The ids of lookups, until the rows that they name are stamped. Within the gate."""

import time
from collections.abc import Iterator

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.stamps import STAMP_BYTES, LookupPlaces, RowStamps
from deltasync.trainer.tracking.tracked_model import Lookups

_MOST_BYTES, _MOST_LOOKUPS = 64 << 20, 1024


class LookupMarks:
    """The ids of lookups, which are not copied, until there is time to sort them out by table.

    Attributes:
        nbytes: bytes of these ids.
    """

    def __init__(self, lookups: Lookups, stamps: RowStamps, cost: TrackerCost) -> None:
        self._places = {kernel: stamps.places(looked_up) for kernel, looked_up in lookups.items()}
        self._stamps, self._cost = stamps, cost
        self._waiting: list[tuple[KeyedJaggedTensor, nn.Module]] = []
        self.nbytes = 0

    def add(self, features: KeyedJaggedTensor, kernel: nn.Module) -> None:
        """Add the ids of a lookup of a kernel."""
        started = time.perf_counter()
        nbytes = features.values().nbytes
        self._waiting.append((features, kernel))
        self.nbytes += nbytes
        self._cost.marking_bytes += nbytes
        self._cost.marking_seconds += time.perf_counter() - started
        # Steps and reads stamp them; without any, they would pile up.
        if self.nbytes > _MOST_BYTES or len(self._waiting) > _MOST_LOOKUPS:
            self.compact()

    def compact(self) -> None:
        """Stamp the rows that were looked up."""
        if not self._waiting:
            return
        started = time.perf_counter()
        for features, kernel in self._waiting:
            self._cost.compaction_bytes += self._stamp(self._places[kernel], features) * STAMP_BYTES
        self.clear()
        self._cost.compaction_seconds += time.perf_counter() - started

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()
        self.nbytes = 0

    def _stamp(self, places: LookupPlaces, features: KeyedJaggedTensor) -> int:
        """Stamp the rows of a lookup; how many ids there are."""
        ids = features.values()
        if not ids.is_cuda:
            return self._stamps.stamp_looked_up(places, ids, _ends(features))
        parts = [(number, ids[part]) for number, part in _parts(places, features)]
        for number, part in parts:
            self._stamps.stamp(number, part)
        return sum(len(part) for _, part in parts)


def _ends(features: KeyedJaggedTensor) -> torch.Tensor:
    """Where the ids of bags begin and end, which lookups compute, or of keys that have not as many bags each."""
    if features.variable_stride_per_key():
        return torch.tensor(features.offset_per_key())
    ends: torch.Tensor = features.offsets()
    return ends


def _parts(places: LookupPlaces, features: KeyedJaggedTensor) -> Iterator[tuple[int, slice]]:
    """Number of each table looked up, and where its ids are among those of a lookup."""
    if places.only is not None:  # Where that is, a GPU would have to be asked for.
        yield places.only, slice(None)
        return
    ends = features.offset_per_key()
    for number, first, end in places.tables[:, :3].tolist():
        yield number, slice(ends[first], ends[end])
