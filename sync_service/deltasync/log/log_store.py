"""The protocol of the log: the truth from which everything else can be rebuilt.

The log has streams of records, and small records by name. A stream has a name such as `cuts/clicks`. Its records
have an address: number, part and index, in this order. A small record has a name such as `consumer/mobile`, and is
replaced as a whole. Writes reach the disk in the order in which they were submitted, each by itself or several
together. If one is on disk, all earlier ones are, except those that were refused.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from deltasync.access.limits import LimitOptions
from deltasync.base.clock import Durations
from deltasync.base.errors import StorageFailed
from deltasync.log.volume import Volume

Buffer = bytes | memoryview
# The largest number, part and index of a record.
LAST_NUMBER = 2**64 - 1
LAST_PART = 2**32 - 1


@dataclass(frozen=True)
class Record:
    """A record of a stream."""

    number: int
    part: int
    index: int
    payload: memoryview


class LogStore(Protocol):
    """A log. Used from any thread.

    Every method that writes returns at once. Its future is done when the write is on disk, or fails with
    `StorageFailed` if nothing was written. A write that fails takes no other with it. A `patient` write matters
    only with a later one: it may be batched with the next write that is not patient, or with several that are.

    Attributes:
        shared: whether another process can take the log over: then it is truncated only up to a checkpoint that
            such a process can read.
        refusing: a write was refused for want of room; set to False once there is room.
        capacity: largest size of its rows; more is refused with `LogFull`.
        volume: the volume of its file.
        commits: how long writes took to reach the disk.
        queue: the writes that are not on disk yet. It takes all of them. To bound memory, whatever submits rows
            waits while it is full.
    """

    shared: bool
    refusing: bool
    capacity: int
    volume: Volume
    commits: Durations
    queue: "WriteQueue"

    def append(
        self,
        stream: str,
        number: int,
        part: int,
        index: int,
        *payload: Buffer,
        after: Sequence[Future[None]] = (),
        patient: bool = False,
    ) -> Future[None]:
        """Write a record, whose payload comes in pieces; one of the same address is replaced.

        The pieces must not change before it is done. A full log refuses it and keeps room for deleting. It is
        refused too if one of the earlier writes in `after` was: with the same error.
        """

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Delete records that were never finished: all from `number` on, or only those of one part of `number`."""

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Delete records that are no longer needed: all up to number `upto`."""

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Write a small record, or delete it with None. A full log takes it too; for `after` see `append`."""

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        """Write several small records, or delete those that are None: all or none. A full log takes them too."""

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """The records with numbers from `first` to `last`, in the order of their addresses.

        Raises:
            StorageFailed: a record is damaged; the message names it.
        """

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, by the rest of their names, sorted.

        Raises:
            StorageFailed: one of them is damaged; the message names it.
        """

    def streams(self) -> list[str]:
        """The names of all streams that have records, sorted.

        Raises:
            StorageFailed: the log's own order is damaged.
        """

    def used_bytes(self) -> int:
        """Bytes that the log holds."""

    def close(self) -> None:
        """Write what was submitted, and close."""


class Logs(Protocol):
    """The logs of a service's models and consumers. Any thread.

    Attributes:
        commits: how long writes took to reach the disk.
        accepted_risks: how acknowledged writes could be lost all the same, in words.
    """

    commits: Durations
    accepted_risks: list[str]

    def of(self, model: str) -> LogStore:
        """The log of a model and its consumers.

        Raises:
            NotOwner: another process of the service owns it.
        """

    def each(self) -> Sequence[LogStore]:
        """All logs that are open, each once."""

    @property
    def refusing(self) -> bool:
        """Whether a log has no room."""

    def close(self) -> None:
        """Write what was submitted, and close. Blocks."""


class EmbeddedLogs:
    """One log for all models, which only this process uses: a `Logs`."""

    def __init__(self, log: LogStore) -> None:
        self._log, self.commits = log, log.commits
        self.accepted_risks: list[str] = []

    def of(self, _model: str) -> LogStore:
        """The one log."""
        return self._log

    def each(self) -> Sequence[LogStore]:
        """The one log."""
        return [self._log]

    @property
    def refusing(self) -> bool:
        """Whether it has no room."""
        return self._log.refusing

    def close(self) -> None:
        """Write what was submitted, and close."""
        self._log.close()


class LogFull(StorageFailed):
    """The log has no room for rows until others are dropped; nothing was lost."""


class LogUnavailable(StorageFailed):
    """The log does not answer now; nothing is known to be lost."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Where the log is kept.

    Attributes:
        directory: folder of the log; made if missing.
        max_bytes: maximum size of the log file, which grows as needed.
    """

    directory: Path
    max_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1 << 20:
            raise ValueError(f"max_bytes: {self.max_bytes}, expected at least 1 MiB")


# Limits of the memory of one transaction.
_COMMIT_BYTES, _COMMIT_OPERATIONS = 32 << 20, 4096
_WAITING_OPERATIONS = 8  # Patient writes are handed over at this number.
_WRITE_BYTES = 1 << 10  # Memory of a write beside its payload.

Write = Callable[[Any], None]


class Submitted(NamedTuple):
    """A write: a function of the transaction, the future of its caller, and its size in bytes."""

    write: Write
    done: Future[None]
    size: int


class WriteQueue:
    """The writes of all threads for the one that writes, in the order in which they were submitted.

    It takes every write: one that makes room must never wait for room. Whatever submits rows waits while it is
    `full`.

    Attributes:
        bytes: of the writes that are not ended yet, with their own memory.
        most_bytes: with more bytes it is full.
    """

    def __init__(self, most_bytes: int = LimitOptions().log_queue_bytes) -> None:
        self.bytes, self.most_bytes = 0, most_bytes
        self._handed_over: queue.SimpleQueue[list[Submitted] | None] = queue.SimpleQueue()
        self._waiting: list[Submitted] = []  # Patient writes that are not handed over yet.
        self._lock = threading.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether more rows have to wait. No patient write waits then, or it might never end."""
        return self.bytes > self.most_bytes

    def limit(self, most_bytes: int) -> None:
        """Change `most_bytes`."""
        with self._lock:
            self.most_bytes = most_bytes
            self._hand_over()

    def submit(self, write: Write, size: int, *, patient: bool = False) -> Future[None]:
        """Submit a write of `size` bytes. A patient one may wait for others, see `LogStore`."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # A write cannot be taken back, even if its waiter is cancelled.
        with self._lock:
            if self._closed:  # No thread writes any more.
                done.set_exception(StorageFailed("the log is closed: the service is shutting down"))
                return done
            self._waiting.append(Submitted(write, done, size))
            self.bytes += size + _WRITE_BYTES
            if not patient or self.full or len(self._waiting) == _WAITING_OPERATIONS:
                self._hand_over()
        return done

    def take(self) -> tuple[list[Submitted], bool]:
        """Wait for writes. Return those to write together, and whether no others will follow."""
        batch, size = list[Submitted](), 0
        while (submitted := self._handed_over.get()) is not None:
            batch += submitted
            size += sum(each.size for each in submitted)
            if size >= _COMMIT_BYTES or len(batch) >= _COMMIT_OPERATIONS or self._handed_over.empty():
                return batch, False
        return batch, True

    def end(self, writes: Iterable[Submitted]) -> None:
        """Stop counting writes that are on disk or refused; called before their futures are done."""
        size = sum(each.size + _WRITE_BYTES for each in writes)
        with self._lock:
            self.bytes -= size

    def close(self) -> None:
        """Take no more writes."""
        with self._lock:
            self._closed = True
            self._hand_over()
            self._handed_over.put(None)

    def _hand_over(self) -> None:
        self._handed_over.put(self._waiting)
        self._waiting = []


def check_written(writes: Sequence[Future[None]]) -> None:
    """Check that no earlier write was refused. One that is under way fails together with all later ones.

    Raises:
        StorageFailed: the error of the first that was refused.
    """
    for write in writes:
        if write.done() and (error := write.exception()):
            raise error
