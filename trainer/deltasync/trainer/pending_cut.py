"""A cut that is published and not known to be sealed."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any

from deltasync.base.errors import DeltasyncError
from deltasync.client import Part, Position, Publisher
from deltasync.trainer.tracking.delta import PendingDelta, Token


class Stopwatch:
    """Runs from the moment it is made until something is done."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ended: float | None = None

    def stop(self, _done: object) -> None:
        """Called by whatever it was."""
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long it took; so far, where it is not done."""
        return (self._ended or time.perf_counter()) - self._began


@dataclass(frozen=True)
class PendingCut:
    """One rank's part of a cut.

    Attributes:
        part: what was published.
        token: acknowledges its rows.
        changes: the tracker's when its rows were read.
        sealed: the position of the cut.
        watch: how long that took.
    """

    part: Part
    token: Token
    changes: int
    sealed: "Future[Position]"
    watch: "Stopwatch"


class CutUnderWay:
    """This rank's part of the cut that is not known to be sealed, if there is one. In the thread that trains."""

    def __init__(self) -> None:
        self._arrivals = ThreadPoolExecutor(1, "deltasync-arrivals")  # On a CPU, no thread is ever started.
        self._launched: Future[PendingCut] | None = None
        self._pending: PendingCut | None = None

    @property
    def pending(self) -> "Future[PendingCut] | PendingCut | None":
        """What stands for it; None if there is none."""
        return self._launched or self._pending

    @property
    def step(self) -> int:
        """After which it is the part; -1 if its rows have not arrived."""
        return self._pending.part.step if self._pending else -1

    def begin(self, publisher: Publisher, read: PendingDelta, changes: int, what: Mapping[str, Any]) -> None:
        """Publish a part, once its rows have arrived in host memory.

        Args:
            publisher: does it.
            read: the rows.
            changes: the tracker's when they were read.
            what: the part's other fields.

        Raises:
            DeltasyncError: it is no part that the publisher could send.
        """
        publish = partial(_published, publisher, read, changes, what)
        if read.arrived:
            self._pending = publish()
        else:
            self._launched = self._arrivals.submit(publish)

    def arrive(self, *, wait: bool = False) -> DeltasyncError | None:
        """Take note that rows that were on their way are published, if they are; the error, if they cannot be."""
        if self._launched and (wait or self._launched.done()):
            launched, self._launched = self._launched, None
            try:
                self._pending = launched.result()
            except DeltasyncError as error:
                return error
        return None

    def ends_within(self, seconds: float) -> bool:
        """Whether its cut has come to its end, sealed or not, which is waited for so long; or there is none."""
        if self._pending:
            wait_for([self._pending.sealed], seconds)
        return self._pending is None or self._pending.sealed.done()

    def take_ended(self) -> PendingCut | None:
        """The part, if its cut has come to its end; it is no longer under way then."""
        ended = self._pending
        if ended is None or not ended.sealed.done():
            return None
        self._pending = None
        return ended

    def drop(self) -> None:
        """Forget it."""
        self.arrive(wait=True)
        self._pending = None

    def close(self) -> None:
        """Drop what has not arrived."""
        self._arrivals.shutdown(wait=False, cancel_futures=True)


def _published(publisher: Publisher, read: PendingDelta, changes: int, what: Mapping[str, Any]) -> PendingCut:
    """Publish a part. In a thread that may wait for its rows."""
    part = Part(rows=read.result.batches(), **what)
    watch = Stopwatch()
    sealed = publisher.publish(part)
    sealed.add_done_callback(watch.stop)
    return PendingCut(part, read.result.token, changes, sealed, watch)
