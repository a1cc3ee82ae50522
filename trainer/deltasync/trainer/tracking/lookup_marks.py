"""Marks rows that are looked up, because the backward of a lookup changes them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.stamps import STAMP_BYTES, RowStamps
from deltasync.trainer.tracking.tracked_model import TrackedModel
from deltasync.trainer.tracking.update_gate import UpdateGate
from deltasync.trainer.tracking.verification import Verification

_MOST_BYTES, _MOST_LOOKUPS = 64 << 20, 1024


class LookupMarks:
    """Stamps the rows of lookups that have a backward.

    It keeps the ids of a lookup, without a copy, until the end of the step, and only then stamps their rows. With
    `overlaps` it stamps them during the output dists of the next step.

    Attributes:
        nbytes: bytes of the ids whose rows are not stamped yet.
    """

    def __init__(
        self,
        tracked: TrackedModel,
        stamps: RowStamps,
        gate: UpdateGate,
        cost: TrackerCost,
        verification: Verification | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.nbytes = 0
        self._places = {kernel: stamps.places(lookups) for kernel, lookups in tracked.lookups.items()}
        self._alone = tracked.alone
        self._stamps = stamps
        self._gate = gate
        self._cost = cost
        self._verification = verification
        self._overlaps = overlaps
        self._waiting: list[tuple[KeyedJaggedTensor, nn.Module]] = []
        self._steps_waited = 0
        self._paused = _Paused()

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """Mark the rows of a lookup when its backward runs. TorchRec calls this after each lookup.

        For the training thread.
        """
        # Some pipelines run backward a step later than the lookup. Marking now, or in
        # `register_post_odist_tracker_fn`, could offer a row before its update and never again. Evaluation has no
        # backward and therefore marks nothing.
        if output.requires_grad and kernel in self._places:
            paused = self._paused.depth > 0
            if not paused:
                self._gate.training_here()
            output.register_hook(partial(self._mark, features, kernel, paused))  # type: ignore[no-untyped-call]

    def _mark(self, features: KeyedJaggedTensor, kernel: nn.Module, paused: bool, _gradient: torch.Tensor) -> None:
        """Add the ids of a lookup. Runs in its backward, before the rows change, in a thread of autograd."""
        with self._gate:
            self._gate.begin_updates()
            if paused:  # Still after `begin_updates`: other threads must not read half-changed rows.
                if self._verification:
                    self._verification.excuse(self._places[kernel].tables[:, 0].tolist())
                return
            started = time.perf_counter()
            nbytes = features.values().nbytes
            self._waiting.append((features, kernel))
            self.nbytes += nbytes
            self._cost.marking_bytes += nbytes
            self._cost.marking_seconds += time.perf_counter() - started
            # The trainer may overwrite ids of an unshared kernel. Without steps and reads, ids would pile up.
            if kernel in self._alone or self.nbytes > _MOST_BYTES or len(self._waiting) > _MOST_LOOKUPS:
                self.compact_here()

    def compact(self) -> None:
        """Stamp the rows of all lookups so far."""
        with self._gate:
            self.compact_here()

    def compact_here(self) -> None:
        """Like `compact`, for callers within the gate."""
        self._steps_waited = 0
        if not self._waiting:
            return
        started = time.perf_counter()
        for features, kernel in self._waiting:
            self._cost.compaction_bytes += self._stamps.stamp_lookup(self._places[kernel], features) * STAMP_BYTES
        self.clear()
        self._cost.compaction_seconds += time.perf_counter() - started

    def end_step(self) -> None:
        """Record that a step is complete. With `overlaps`, ids wait for at most one more step."""
        if not self._overlaps or self._steps_waited:
            self.compact()
        self._steps_waited += 1

    def clear(self) -> None:
        """Drop the ids whose rows are not stamped yet."""
        self._waiting.clear()
        self.nbytes = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not mark the lookups of this thread within the block."""
        self._paused.depth += 1
        try:
            yield
        finally:
            self._paused.depth -= 1


class _Paused(threading.local):
    """The number of `pause` blocks that a thread is in."""

    depth = 0
