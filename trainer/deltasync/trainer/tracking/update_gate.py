"""Keeps reads and updates apart: no read sees half a row, or a mark whose row has not changed yet."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.tracking.gpu import Streams


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
        self._streams = Streams(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        """Keep other threads out; on a GPU, what is launched from now on runs after the last read."""
        self._lock.acquire()
        if self._streams:
            self._streams.after_reads()

    def __exit__(self, *_: object) -> None:
        if self._streams:
            self._streams.before_reads()
        self._lock.release()

    def training_here(self) -> None:
        """Note that the calling thread trains."""
        self._training_thread = threading.get_ident()

    def begin_updates(self) -> None:
        """Rows are about to change. Within the gate, in the thread that runs backward."""
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
        """On a GPU, make everything that this thread launches from now on run after the last read."""
        if self._streams:
            self._streams.after_reads()

    @contextmanager
    def side_stream(self, *, wait: bool = True) -> Iterator[None]:
        """Launch copies to the host within on the stream of reads.

        Args:
            wait: whether to wait for them at the end; otherwise wait for `arrival`.
        """
        if not self._streams:
            yield
            return
        with self._streams.copying(wait=wait):
            yield

    def arrival(self) -> torch.cuda.Event | None:
        """An event at the end of the work on the stream of reads so far; None if there is no such stream."""
        return self._streams.arrival() if self._streams else None
