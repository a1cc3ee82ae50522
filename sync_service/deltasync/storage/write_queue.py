"""What was submitted to a log and is not on disk yet."""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from deltasync.core.errors import StorageFailed
from deltasync.core.limits import LimitOptions

# Bound what one transaction holds in memory.
_COMMIT_BYTES, _COMMIT_OPERATIONS = 32 << 20, 4096
_WAITING_OPERATIONS = 8  # So many that may wait for others do not wait any longer.
_WRITE_BYTES = 1 << 10  # What one takes in memory beside what it writes.

Write = Callable[[Any], None]


class Submitted(NamedTuple):
    """A write of so many bytes, in a transaction that it is given, and who waits for it."""

    write: Write
    done: Future[None]
    size: int


class WriteQueue:
    """Writes of any threads for the one that writes them: in the order in which they were submitted.

    It takes all of them: what makes room must never wait for room. Who submits rows waits while it is `full`.

    Attributes:
        bytes: of those that are not ended yet, with what they take in memory themselves.
        most_bytes: with more it is full.
    """

    def __init__(self, most_bytes: int = LimitOptions().log_queue_bytes) -> None:
        self.bytes, self.most_bytes = 0, most_bytes
        self._handed_over: queue.SimpleQueue[list[Submitted] | None] = queue.SimpleQueue()
        self._waiting: list[Submitted] = []  # Patient ones, of which the writer knows nothing yet.
        self._lock = threading.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether more rows are to wait. Then none waits for others, so that each is ended some time."""
        return self.bytes > self.most_bytes

    def limit(self, most_bytes: int) -> None:
        """Have another bound from now on."""
        with self._lock:
            self.most_bytes = most_bytes
            self._hand_over()

    def submit(self, write: Write, size: int, *, patient: bool = False) -> Future[None]:
        """Submit a write of so many bytes. A patient one may wait for others, see `LogStore`."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # A write cannot be taken back, even if its waiter is cancelled.
        with self._lock:
            if self._closed:  # Nobody writes any more: who waits for it would wait for ever.
                done.set_exception(StorageFailed("the log is closed: the service is shutting down"))
                return done
            self._waiting.append(Submitted(write, done, size))
            self.bytes += size + _WRITE_BYTES
            if not patient or self.full or len(self._waiting) == _WAITING_OPERATIONS:
                self._hand_over()
        return done

    def take(self) -> tuple[list[Submitted], bool]:
        """Wait for writes: as many as are there and are written together; and whether no others will follow."""
        batch, size = list[Submitted](), 0
        while (submitted := self._handed_over.get()) is not None:
            batch += submitted
            size += sum(each.size for each in submitted)
            if size >= _COMMIT_BYTES or len(batch) >= _COMMIT_OPERATIONS or self._handed_over.empty():
                return batch, False
        return batch, True

    def end(self, writes: Iterable[Submitted]) -> None:
        """Count writes no more, which are on disk, or refused; before who waits for them is told."""
        size = sum(each.size + _WRITE_BYTES for each in writes)
        with self._lock:
            self.bytes -= size

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._closed = True
            self._hand_over()
            self._handed_over.put(None)

    def _hand_over(self) -> None:
        self._handed_over.put(self._waiting)
        self._waiting = []
