"""A cut from the moment its rows are read until this rank knows whether it was sealed."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

from deltasync.base.errors import DeltasyncError
from deltasync.client import Part, Position, Publisher
from deltasync.trainer.tracking.delta import Delta


class CutUnderWay:
    """This rank's part of a cut. In the thread that trains.

    Attributes:
        part: what is published; without rows until they have arrived.
        token: acknowledges the rows.
        changes: the tracker's when the rows were read.
    """

    def __init__(self, publisher: Publisher, delta: Delta, part: Part, changes: int) -> None:
        """Publish a delta. Where its rows are on their way from a GPU, a thread waits for them first.

        Args:
            publisher: sends the part.
            delta: the rows.
            part: everything else of the part.
            changes: the tracker's when the rows were read.

        Raises:
            DeltasyncError: the publisher cannot send such a part.
        """
        self.part = part
        self.token = delta.token
        self.changes = changes
        self._publisher = publisher
        self._delta = delta
        self._started = self._ended = 0.0
        self._arrival: Future[Future[Position]] | None = None
        self._sealed: Future[Position] | None = None
        if delta.arrived:
            self._sealed = self._publish()
        else:
            arrivals = ThreadPoolExecutor(1, "deltasync-arrivals")
            self._arrival = arrivals.submit(self._publish)
            arrivals.shutdown(wait=False)

    def note_arrival(self, *, wait: bool = False) -> DeltasyncError | None:
        """Note whether the rows were published, or wait for it. Return why they cannot be."""
        if self._arrival and (wait or self._arrival.done()):
            arrival, self._arrival = self._arrival, None
            try:
                self._sealed = arrival.result()
            except DeltasyncError as error:
                return error
        return None

    @property
    def answer(self) -> "Future[Position] | None":
        """The service's answer: the position of the sealed cut, or an error. None until it has come."""
        return self._sealed if self._sealed and self._sealed.done() else None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the service's answer, no longer than this; whether it has come."""
        if self._sealed:
            wait_for([self._sealed], seconds)
        return self.answer is not None

    @property
    def seconds(self) -> float:
        """How long the service took to answer, from when the rows were in host memory; so far, if it has not."""
        return (self._ended or time.perf_counter()) - self._started

    def _publish(self) -> "Future[Position]":
        self.part = replace(self.part, rows=self._delta.result.batches(), made_unix_ns=time.time_ns())
        self._started = time.perf_counter()
        sealed = self._publisher.publish(self.part)
        sealed.add_done_callback(self._note_end)
        return sealed

    def _note_end(self, _sealed: object) -> None:
        self._ended = time.perf_counter()
