"""Keeping reads and updates apart, so that no read sees a row half written, or marked before it has changed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sync_service.errors import DeltasyncError


class UpdateGate:
    """Rows change between the first mark of a step and the step's end; reads happen outside of that.

    The thread that trains never waits for itself: when it reads, its backward is over. On a GPU, reads run on a
    stream of their own; streams wait for each other there, and the host waits for neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._settled = threading.Condition(threading.RLock())
        self._updating = False
        self._training_thread = 0
        self._streams = _Streams(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        """Nothing else of the tracker goes on meanwhile; on a GPU, what is launched comes after the last read."""
        self._settled.acquire()
        if self._streams:
            self._streams.after_reads()

    def __exit__(self, *_: object) -> None:
        self._settled.release()

    def training_here(self) -> None:
        """Note that the calling thread trains."""
        self._training_thread = threading.get_ident()

    def begin_updates(self) -> None:
        """Rows are about to change. Called while the gate is held, by whichever thread runs backward."""
        self._updating = True

    def end_updates(self) -> None:
        """The step is complete: rows stay as they are until the next begins."""
        with self._settled:
            if self._streams:
                self._streams.note_update()
            self._updating = False
            self._settled.notify_all()

    @contextmanager
    def reading(self, timeout_seconds: float | None) -> Iterator[None]:
        """No row changes meanwhile. From another thread than the training one, waits for the end of the step.

        Raises:
            DeltasyncError: the step did not end in time.
        """
        with self._settled:
            training = threading.get_ident() == self._training_thread
            if not training and not self._settled.wait_for(lambda: not self._updating, timeout_seconds):
                raise DeltasyncError(
                    f"the training step has not ended within {timeout_seconds} s: is step() called after each?"
                )
            if not self._streams:
                yield
                return
            with self._streams.reads_after_updates(training):
                yield

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Where copies of what was read run on; complete when this ends."""
        if not self._streams:
            yield
            return
        with self._streams.copying():
            yield


class _Streams:
    """The order between the stream that trains and the one that reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._updated: torch.cuda.Event | None = None
        self._read: torch.cuda.Event | None = None

    def note_update(self) -> None:
        self._updated = torch.cuda.current_stream(self._device).record_event()

    def after_reads(self) -> None:
        if self._read:
            torch.cuda.current_stream(self._device).wait_event(self._read)
            self._read = None

    @contextmanager
    def reads_after_updates(self, training: bool) -> Iterator[None]:
        if training:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        elif self._updated:
            self._side.wait_event(self._updated)
        with torch.cuda.stream(self._side):
            yield
            self._read = self._side.record_event()

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield
        self._side.synchronize()
