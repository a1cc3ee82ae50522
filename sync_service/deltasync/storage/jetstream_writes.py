"""Writes to a log among brokers, from what was submitted to its acknowledgement."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from deltasync.core.durations import Durations
from deltasync.core.errors import StorageFailed
from deltasync.storage.lmdb_records import with_checksum
from deltasync.storage.log_store import Buffer
from deltasync.storage.write_queue import Submitted, WriteQueue

# What a message has beside its payload: subject and headers.
HEADER_BYTES = 4 << 10


def pieces_of(key: bytes, payload: Sequence[Buffer], max_payload: int) -> list[bytes]:
    """A record with its checksum, in as many messages as it takes."""
    whole, most = with_checksum(key, *payload), max(1, max_payload - HEADER_BYTES)
    return [whole[start : start + most] for start in range(0, len(whole), most)]


def check_written(writes: Sequence[Future[None]]) -> None:
    """Check that none of these writes was refused; one that is under way fails with all that come after it.

    Raises:
        StorageFailed: what one was refused with.
    """
    for write in writes:
        if write.done() and (error := write.exception()):
            raise error


class Operation:
    """A write that was submitted: done once all of its messages are acknowledged. Any thread."""

    def __init__(self, submitted: Submitted, queue: WriteQueue, commits: Durations) -> None:
        self._submitted, self._queue, self._commits = submitted, queue, commits
        self._begun = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._expected, self._closed = 0, False

    @classmethod
    def nothing(cls, queue: WriteQueue, commits: Durations) -> "Operation":
        """One that is over."""
        operation = cls(Submitted(lambda _: None, Future(), 0), queue, commits)
        operation._over.set()
        return operation

    def expect(self, land: Callable[[int], None]) -> Callable[[int], None]:
        """What is to be called once a further message of it has landed: it does this before that counts."""
        with self._lock:
            self._expected += 1

        def landed(sequence: int) -> None:
            land(sequence)
            with self._lock:
                self._expected -= 1
            self._end_if_done()

        return landed

    def close(self) -> None:
        """Note that there are no further messages of it."""
        self._closed = True
        self._end_if_done()

    def refuse(self, error: Exception) -> None:
        """Fail, as far as it is not over."""
        failure = (
            error
            if isinstance(error, StorageFailed)
            else StorageFailed(f"the log could not be written: {error!r}: restart the service")
        )
        self._end(failure)

    def wait(self) -> None:
        """Wait until it is over."""
        self._over.wait()

    def _end_if_done(self) -> None:
        with self._lock:
            done = self._closed and not self._expected
        if done:
            self._end(None)

    def _end(self, error: StorageFailed | None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        self._queue.end([self._submitted])
        if error:
            self._submitted.done.set_exception(error)
        else:
            self._commits.add(time.monotonic() - self._begun)
            self._submitted.done.set_result(None)
