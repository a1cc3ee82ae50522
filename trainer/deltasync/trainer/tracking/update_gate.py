"""Separates reads from updates: no read sees a half-changed row, or a mark before its row has changed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.tracking.gpu import Streams


class UpdateGate:
    """Allows reads only while no rows change, which is from the end of a step to the first mark of the next.

    The training thread reads without waiting, because its backward is over when it reads. Other threads wait for
    the end of the step. On a GPU, reads run on a separate stream; streams wait for each other, but threads do not
    wait for streams.

    Attributes:
        updating: whether rows may be changing.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self.updating = False
        self._training_thread = threading.get_ident()  # Until a lookup or a step happens in another thread.
        self._streams = Streams(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        """Exclude other threads. On a GPU, work launched from now on runs after the last read."""
        self._lock.acquire()
        if self._streams:
            self._streams.after_reads()

    def __exit__(self, *_: object) -> None:
        if self._streams:
            self._streams.before_reads()
        self._lock.release()

    def training_here(self) -> None:
        """Record the calling thread as the training thread."""
        self._training_thread = threading.get_ident()

    def begin_updates(self) -> None:
        """Record that rows are about to change. Call within the gate, in the thread that changes them."""
        self.updating = True

    def end_updates(self) -> None:
        """Record that the step is complete: rows do not change until the next step starts."""
        with self:
            self.updating = False
            self._settled.notify_all()

    @contextmanager
    def reading(self, timeout_seconds: float | None) -> Iterator[None]:
        """Within the block, no row changes. Threads that do not train first wait for the step to end."""
        with self._settled:
            training = threading.get_ident() == self._training_thread
            if not training and not self._settled.wait_for(lambda: not self.updating, timeout_seconds):
                raise DeltasyncError(
                    f"the training step has not ended within {timeout_seconds} s: call step() after each step"
                )
            if not self._streams:
                yield
                return
            if training:  # It may read before it calls `step()`.
                self._streams.before_reads()
            with self._streams.reading():
                yield

    def hold_changes(self) -> None:
        """On a GPU, make all work that this thread launches from now on run after the last read."""
        if self._streams:
            self._streams.after_reads()

    @contextmanager
    def side_stream(self, *, wait: bool = True) -> Iterator[None]:
        """Launch the block's copies to the host on the stream of reads; with `wait`, wait for them at the end."""
        if not self._streams:
            yield
            return
        with self._streams.copying(wait=wait):
            yield

    def arrival(self) -> torch.cuda.Event | None:
        """Record an event after all work on the stream of reads so far; None without a GPU."""
        return self._streams.arrival() if self._streams else None
