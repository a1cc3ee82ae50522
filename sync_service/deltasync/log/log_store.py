"""The log, as the service uses it: the truth that everything else can be rebuilt from.

It has streams of records, and small records by name. A stream is called, say, `cuts/clicks`, and its records have
an address: number, part, index, in this order. A small record is called, say, `consumer/mobile`, and is replaced
as a whole. Writes reach the disk in the order in which they were submitted, each by itself or several together:
one that is on disk shows that those before it are, as far as they were not refused.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from deltasync.access.limits import LimitOptions
from deltasync.base.durations import Durations
from deltasync.base.errors import StorageFailed
from deltasync.log.volume import Volume

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


Buffer = bytes | memoryview
# The largest number, part and index of a record.
LAST_NUMBER = 2**64 - 1
LAST_PART = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Where the log is kept.

    Attributes:
        directory: folder of the log; made if missing.
        max_bytes: hard cap of the log's file, which grows only as needed.
    """

    directory: Path
    max_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1 << 20:
            raise ValueError(f"max_bytes: {self.max_bytes}, expected at least 1 MiB")


@dataclass(frozen=True)
class Record:
    """A record of a stream."""

    number: int
    part: int
    index: int
    payload: memoryview


class LogFull(StorageFailed):
    """The log has no room for rows before others are dropped; nothing was lost."""


class LogUnavailable(StorageFailed):
    """The log does not answer now: what it has is not known, and may be all that it had."""


class LogStore(Protocol):
    """A log. Used from any thread.

    Every method that writes returns at once; its future is done when the write is on disk, or fails with
    `StorageFailed`: then nothing was written. A write that fails takes no other with it. One that is `patient` may
    lie in memory until one comes that is not, or there are several: for what matters only with a later one.

    Attributes:
        shared: whether other processes may go on with it: then files are of no use to who comes next, and it is
            cut once checkpoints elsewhere have what is dropped.
        refusing: a write was refused for want of room; whoever has made room sets it to False.
        capacity: bytes of rows that it takes, at most: `LogFull` is for more.
        volume: where its file is.
        commits: how long it took to bring what was submitted to the disk.
        queue: what was submitted and is not on disk yet. It takes everything; who submits rows waits while it is
            full, so that memory is bounded by its limit and what each of those who wait has submitted last.
    """

    shared: bool
    refusing: bool
    capacity: int
    volume: Volume
    commits: Durations
    queue: WriteQueue

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

        The pieces must not change before it is done. Refused once the log is full, but for what forgetting needs;
        and where one of the writes `after` which it comes, all submitted before, was refused: with that one's
        error.
        """

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Forget what was never finished: the records from `number` on, or only those of one part of `number`."""

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Forget what is no longer needed: the records up to number `upto`."""

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Keep a small record, instead of the one of that name; None forgets it. Also in a full log; not where one
        of the writes `after` which it comes was refused, see `append`.
        """

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        """Keep several small records, all of them or none; None forgets one. Also in a full log."""

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
        """Write what was submitted, and end."""


class Logs(Protocol):
    """What the models of a service are written down in, and their consumers. Any thread.

    Attributes:
        commits: how long it took to bring what was submitted to the disk.
        accepted_risks: how what was acknowledged could be lost all the same, in words.
    """

    commits: Durations
    accepted_risks: list[str]

    def of(self, model: str) -> LogStore:
        """The log of a model, with all that its consumers hold.

        Raises:
            NotOwner: another process of the service has it.
        """

    def each(self) -> Sequence[LogStore]:
        """All logs that are open, each once."""

    @property
    def refusing(self) -> bool:
        """Whether one of them has no room."""

    def close(self) -> None:
        """Write what was submitted, and end. Blocks."""


class EmbeddedLogs:
    """All models in one log, of the service's own: a `Logs`."""

    def __init__(self, log: LogStore) -> None:
        self._log, self.commits = log, log.commits
        self.accepted_risks: list[str] = []

    def of(self, _model: str) -> LogStore:
        """The log of a model: that of all."""
        return self._log

    def each(self) -> Sequence[LogStore]:
        """The one that there is."""
        return [self._log]

    @property
    def refusing(self) -> bool:
        """Whether it has no room."""
        return self._log.refusing

    def close(self) -> None:
        """Write what was submitted, and end."""
        self._log.close()
