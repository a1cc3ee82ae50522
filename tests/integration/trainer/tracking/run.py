"""Training a case, and checking all that its trackers say."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tests.integration.trainer.tracking.batches import Batch, Features
from tests.integration.trainer.tracking.follower import Follower
from tests.integration.trainer.tracking.models import Case, build
from tests.integration.trainer.tracking.pipelines import Training
from tests.integration.trainer.tracking.rows import Ids, changed, weights
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import lookups_of
from deltasync.trainer.tracking.tracked_model import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracker import Tracker

BATCHES = 8


class Run:
    """A case in training."""

    def __init__(self, case: Case, training: Training) -> None:
        self._model, optimizer = build(case)
        self._training = training
        self._batches = Features(case.ids, case.weighted, case.variable).batches(BATCHES + 1)
        self._lengths_known = _watch_lengths(self._model)
        self._pipeline = training.pipeline(self._model, optimizer, torch.device("cpu"))
        self._weights = weights(self._model)
        self._tracker = Tracker(self._model, TrackerOptions(dense=True, verify=True, consumers=()))
        self._followers = [
            self._follower(TrackingMode.EMBEDDING, 1),
            self._follower(TrackingMode.EMBEDDING_LAST, 3),
            self._follower(TrackingMode.EMBEDDING, BATCHES),
            self._follower(TrackingMode.ID_ONLY, BATCHES),
        ]
        self._changed: Ids = {}

    def problems(self) -> list[str]:
        """Train, and say what was wrong on this rank."""
        stream = iter([next(self._batches) for _ in range(BATCHES)])
        for number in range(1, BATCHES + 1):
            with self._checked(f"batch {number}", read=number == BATCHES):
                self._pipeline.progress(stream)
                if number % self._training.batches_per_step == 0:
                    self._tracker.step()
            if number == BATCHES // 2:
                self._followers.append(self._follower(TrackingMode.EMBEDDING, 2))
        if self._training.lets_go:
            self._go_on_without_pipeline(next(self._batches))
        return [problem for follower in self._followers for problem in follower.problems] + self._too_little_seen()

    @contextmanager
    def _checked(self, what: str, *, read: bool) -> Iterator[None]:
        """Consumers are given exactly the rows that change within."""
        before = self._weights
        yield
        self._weights = weights(self._model)
        rows = changed(before, self._weights)
        for table, ids in rows.items():
            self._changed.setdefault(table, set()).update(ids)
        for follower in self._followers:
            follower.after(what, rows, read=read)

    def _go_on_without_pipeline(self, batch: Batch) -> None:
        """A forward changes nothing, but for evictions; a backward does."""
        if hasattr(self._pipeline, "detach"):
            self._pipeline.detach()
        with self._checked("no_grad", read=True), torch.no_grad():
            self._model(batch)
        with self._checked("forward alone", read=True):
            loss, _ = self._model(batch)
        with self._checked("backward alone", read=True):
            loss.backward()

    def _too_little_seen(self) -> list[str]:
        """The other checks would pass then."""
        found = [f"{table} has never changed" for table, ids in self._changed.items() if not ids]
        if any("embedding" in table for table in self._changed) and not self._lengths_known:
            found.append("no lookup was seen")
        return found if all(self._lengths_known) else [*found, "lengths were not on the host in a hook"]

    def _follower(self, mode: TrackingMode, every: int) -> Follower:
        return Follower(self._tracker, mode, every, lambda: self._weights)


def _watch_lengths(model: nn.Module) -> list[bool]:
    """Whether the lengths of each lookup are on the host when its hook is called: else it would wait for a GPU."""
    known: list[bool] = []

    def note(features: KeyedJaggedTensor, _output: torch.Tensor, _kernel: nn.Module) -> None:
        known.append(features._length_per_key is not None)

    for _, module in sharded_modules(model):
        for lookup in lookups_of(module):
            lookup.register_optim_state_tracker_fn(note)
    return known
