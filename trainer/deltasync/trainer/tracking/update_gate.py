"""Keeps reads apart from updates: no read sees a half-changed row, or a mark before its row has changed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltasync.base.errors import DeltasyncError


class UpdateGate:
    """Allows reads only while no rows change, which is from the end of a step to the first mark of the next.

    The training thread reads without waiting, because its backward is over when it reads. Other threads wait for
    the end of the step. On a GPU, reads run on a separate stream; streams wait for each other, but threads do not
    wait for streams.

    Attributes:
        updating: whether rows may be changing. Set it within the gate, in the thread that changes them.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self.updating = False
        self._training_thread = threading.get_ident()  # Until a lookup or a step happens in another thread.
        self._streams = _Streams(device) if device.type == "cuda" else None

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
        with torch.cuda.stream(self._streams.side):
            yield
        if wait:
            self._streams.side.synchronize()

    def arrival(self) -> torch.cuda.Event | None:
        """Record an event after all work on the stream of reads so far; None without a GPU."""
        return self._streams.side.record_event() if self._streams else None


class _Streams:
    """The order between the streams that change rows or stamps and the `side` one, which reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._read: torch.cuda.Event | None = None

    def before_reads(self) -> None:
        """Make reads run after all work launched on this thread's stream so far."""
        stream = torch.cuda.current_stream(self._device)
        self._changed[stream] = stream.record_event()

    def after_reads(self) -> None:
        """Make work launched on this thread's stream from now on run after the last read."""
        if self._read:
            torch.cuda.current_stream(self._device).wait_event(self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Launch the reads of the block on the side stream, after all changes."""
        for event in self._changed.values():
            self.side.wait_event(event)
        with torch.cuda.stream(self.side):
            try:
                yield
            finally:
                self._read = self.side.record_event()
