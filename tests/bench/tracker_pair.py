"""TorchRec's tracker and ours on one model, each with a watch on its own functions."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.bench.tracker_model import Training
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode as TheirMode
from torchrec.distributed.model_tracker.types import UniqueRows

from deltasync.trainer.tracking.delta import DeltaRows
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.torchrec_hooks import Listeners
from deltasync.trainer.tracking.tracker import Tracker

_FQN = "sparse.embeddings.table"


class Stopwatch:
    """Adds up seconds, those of a GPU too."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def running(self) -> Iterator[None]:
        self._synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds += time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class TorchRecTracker(ModelDeltaTrackerTrec):  # type: ignore[misc]  # torchrec's types are not followed
    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self._watch = Stopwatch(training.device)
        # TorchRec has room for one tracker at a time: the others are put back beside this one.
        place = training.model.module.sparse
        others, place.post_lookup_tracker_fn = place.post_lookup_tracker_fn, None
        super().__init__(training.model, consumers=consumers, mode=TheirMode(mode.value))
        if others:
            Listeners.at(place, "post_lookup_tracker_fn").add(others)

    def record_lookup(self, *arguments: Any) -> None:
        with self._watch.running():
            super().record_lookup(*arguments)

    def begin_step(self) -> None:
        """What `DistributedModelParallel` calls before each forward."""
        with self._watch.running():
            self.step()

    def read(self, consumer: str) -> UniqueRows:
        """What has changed; it is not offered again."""
        with self._watch.running():
            return self.get_unique(consumer)[_FQN]

    @property
    def seconds(self) -> float:
        return self._watch.seconds

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors it holds."""
        lookups = self.store.per_fqn_lookups.values()
        kept = [tensor for by_table in lookups for lookup in by_table for tensor in (lookup.ids, lookup.states)]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


class WatchedTracker(Tracker):
    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self._watch = Stopwatch(training.device)
        super().__init__(training.model, TrackerOptions(mode=mode, consumers=consumers))

    def record_lookup(self, *arguments: Any) -> None:
        with self._watch.running():
            super().record_lookup(*arguments)

    def end_step(self) -> None:
        """What a trainer calls after each step."""
        with self._watch.running():
            self.step()

    def read(self, consumer: str) -> DeltaRows:
        """What has changed; it is acknowledged at once."""
        with self._watch.running():
            delta = self.get_delta(consumer)
            self.acknowledge(delta.token)
        return delta.rows[_FQN]

    @property
    def seconds(self) -> float:
        """Spent in it so far. The tracker itself measures what it does in backward."""
        return self._watch.seconds + self.cost.marking_seconds


class TrackerPair:
    """Both, in the same mode on the same model."""

    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self.mode = mode
        self.theirs = TorchRecTracker(training, mode, consumers)
        self.ours = WatchedTracker(training, mode, consumers)

    def read(self, consumer: str, *, ours_first: bool = True) -> int:
        """Read both; the number of rows."""
        if ours_first:
            ours, theirs = self.ours.read(consumer), self.theirs.read(consumer)
        else:
            theirs, ours = self.theirs.read(consumer), self.ours.read(consumer)
        order = theirs.ids.argsort()
        same = torch.equal(theirs.ids[order].cpu(), ours.ids)
        if theirs.states is not None and ours.first is not None:
            same = same and torch.equal(theirs.states[order].cpu(), ours.first)
        if not same:
            raise RuntimeError(f"mode {self.mode.value!r}: the trackers do not say the same")
        return len(ours.ids)
