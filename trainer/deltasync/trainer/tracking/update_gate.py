"""Keeping reads and updates apart, so that no read sees a row half written, or marked before it has changed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltasync.base.errors import DeltasyncError


class UpdateGate:
    """Rows change between the first mark of a step and the step's end; reads happen at other times.

    The thread that trains reads without waiting: its backward is over by then. Other threads wait for the end of
    the step. On a GPU, reads run on a stream of their own; streams wait for each other there, threads for no
    stream.

    Attributes:
        updating: rows may be changing.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self.updating = False
        self._training_thread = threading.get_ident()  # Until a lookup or a step is seen in another.
        self._streams = _Streams(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        """Keep other threads out; on a GPU, what is launched from now on runs after the last read."""
        self._lock.acquire()
        if self._streams:
            self._streams.after_reads()

    def __exit__(self, *_: object) -> None:
        if self._streams:
            self._streams.before_reads()
        self._lock.release()

    @property
    def streams(self) -> bool:
        """Whether reads run on a stream of their own."""
        return self._streams is not None

    def training_here(self) -> None:
        """Note that the calling thread trains."""
        self._training_thread = threading.get_ident()

    def begin_updates(self) -> None:
        """Rows are about to change. Called while the gate is held, by whichever thread runs backward."""
        self.updating = True

    def end_updates(self) -> None:
        """The step is complete: rows do not change until the next begins."""
        with self:
            self.updating = False
            self._settled.notify_all()

    @contextmanager
    def reading(self, timeout_seconds: float | None) -> Iterator[None]:
        """Within, no row changes. Another thread than the one that trains waits for the end of the step first.

        Raises:
            DeltasyncError: the step did not end in time.
        """
        with self._settled:
            training = threading.get_ident() == self._training_thread
            if not training and not self._settled.wait_for(lambda: not self.updating, timeout_seconds):
                raise DeltasyncError(
                    f"the training step has not ended within {timeout_seconds} s: is step() called after each?"
                )
            if not self._streams:
                yield
                return
            if training:  # It may read before it calls `step()`.
                self._streams.before_reads()
            with self._streams.reading():
                yield

    def hold_changes(self) -> None:
        """On a GPU, have what this thread launches from now on run after the last read, whatever it is."""
        if self._streams:
            self._streams.after_reads()

    @contextmanager
    def side_stream(self, *, wait: bool = True) -> Iterator[None]:
        """Copies to the host that are launched within run on the stream of reads.

        Args:
            wait: they are complete at the end; else when `arrival` says so.
        """
        if not self._streams:
            yield
            return
        with self._streams.copying(wait=wait):
            yield

    def arrival(self) -> torch.cuda.Event | None:
        """When all that the stream of reads was given so far will be done; None where that is now."""
        return self._streams.arrival() if self._streams else None


class _Streams:
    """The order between the streams that change rows or stamps and the one that reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._read: torch.cuda.Event | None = None

    def before_reads(self) -> None:
        """Have reads run after all work launched on this thread's stream so far."""
        stream = torch.cuda.current_stream(self._device)
        self._changed[stream] = stream.record_event()

    def after_reads(self) -> None:
        """Have work launched on this thread's stream from now on run after the last read."""
        if self._read:
            torch.cuda.current_stream(self._device).wait_event(self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        for event in self._changed.values():
            self._side.wait_event(event)
        with torch.cuda.stream(self._side):
            try:
                yield
            finally:
                self._read = self._side.record_event()

    @contextmanager
    def copying(self, *, wait: bool) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield
        if wait:
            self._side.synchronize()

    def arrival(self) -> torch.cuda.Event:
        arrival: torch.cuda.Event = self._side.record_event()
        return arrival
