"""The protocol of the log, the source of truth from which everything else can be rebuilt.

The log has streams of records, and small records. A stream has a name such as `cuts/clicks`; an address orders its
records: number, part and index. A small record has a name such as `consumer/mobile`, and is replaced as a whole.
Writes reach the disk in the order of submission, alone or in batches. Once a write is on disk, so are all earlier
ones, except those that were refused.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from deltasync.access.limits import LimitOptions
from deltasync.base.clock import Durations
from deltasync.base.errors import StorageFailed
from deltasync.log.volume import Volume

B = TypeVar("B")
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


class Address(NamedTuple):
    """Place of a record in the log: number, part and index in a stream."""

    stream: str
    number: int
    part: int
    at: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Number, part and index."""
        return self[1:]


class LogStore(Protocol):
    """A log. Safe to use from any thread.

    Every method that writes returns at once. Its future ends when the write is on disk, or fails with
    `StorageFailed` if nothing was written. A failed write does not affect others. A `patient` write matters only
    with a later one, and may be batched with the next write that is not patient, or with several patient ones.

    Methods that read raise `StorageFailed` for a damaged record, and name it.

    Attributes:
        shared: whether another process can take over the log. If so, it is truncated only up to a checkpoint which
            that process can read.
        refusing: whether a write was refused for lack of room; set to False once there is room.
        capacity: maximum size of its rows; beyond it, writes fail with `LogFull`.
        volume: the volume of its file.
        commits: time that writes took to reach the disk.
        queue: the writes that are not on disk yet. It accepts every write; to bound memory, callers that submit
            rows wait while it is full.
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
        """Write a record from its pieces, replacing one of the same address.

        The pieces must not change until the write is done. A full log refuses the record, to keep room for
        deletes. If one of the earlier writes in `after` was refused, this one fails with the same error.
        """

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Delete unfinished records: all from `number` on, or only those of one part of `number`."""

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Delete the records up to number `upto`, which are no longer needed."""

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Write a small record, or delete it with None, even in a full log. For `after` see `append`."""

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        """Write several small records, and delete those that are None, all or none, even in a full log."""

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """The records with numbers from `first` to `last`, in the order of their addresses."""

    def newest(self, stream: str) -> int:
        """The largest number of a stream's records; 0 if it has none."""

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, sorted and keyed by the rest of their names."""

    def streams(self) -> list[str]:
        """The names of all streams that have records, sorted."""

    def used_bytes(self) -> int:
        """Size of the log's content in bytes."""

    def close(self) -> None:
        """Finish the submitted writes, and close."""


class Logs(Protocol):
    """The logs of a service's models and consumers. Safe to use from any thread.

    Attributes:
        commits: time that writes took to reach the disk.
        accepted_risks: ways to lose acknowledged writes that the operator accepted, in words.
    """

    commits: Durations
    accepted_risks: list[str]

    def of(self, model: str) -> LogStore:
        """The log of a model and its consumers; `NotOwner` if another process of the service owns it."""

    def each(self) -> Sequence[LogStore]:
        """All open logs, each once."""

    @property
    def refusing(self) -> bool:
        """Whether a log lacks room."""

    def close(self) -> None:
        """Finish the submitted writes, and close. Blocks."""


class EmbeddedLogs:
    """One log for all models, used by this process alone: a `Logs`."""

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
        """Whether it lacks room."""
        return self._log.refusing

    def close(self) -> None:
        """Close it."""
        self._log.close()


class LogFull(StorageFailed):
    """The log has no room for rows until older ones are dropped; nothing was lost."""


class LogUnavailable(StorageFailed):
    """The log does not answer at present; as far as is known, nothing was lost."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Location and size of the log.

    Attributes:
        directory: folder of the log, made if missing.
        max_bytes: maximum size of the log file, which grows as needed.
    """

    directory: Path
    max_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1 << 20:
            raise ValueError(f"max_bytes: {self.max_bytes}, expected at least 1 MiB")


# Limits that bound the memory of one transaction.
_COMMIT_BYTES, _COMMIT_OPERATIONS = 32 << 20, 4096
_WAITING_OPERATIONS = 8  # At this number, patient writes are handed over.
_WRITE_BYTES = 1 << 10  # Memory that a write takes in addition to its payload.

Write = Callable[[Any], None]


class Submitted(NamedTuple):
    """A write: a function of the transaction, its caller's future, and its size in bytes."""

    write: Write
    done: Future[None]
    size: int


class WriteQueue:
    """Queue from all threads to the writing thread, in the order of submission.

    It accepts every write, because one that makes room must never wait for room. Callers that submit rows wait
    while it is `full`.

    Attributes:
        bytes: size of the unfinished writes, with their own memory.
        most_bytes: above this size the queue is full.
    """

    def __init__(self, most_bytes: int = LimitOptions().log_queue_bytes) -> None:
        self.bytes, self.most_bytes = 0, most_bytes
        self._handed_over: queue.SimpleQueue[list[Submitted] | None] = queue.SimpleQueue()
        self._waiting: list[Submitted] = []  # Patient writes that are not yet handed over.
        self._lock = threading.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether callers that submit rows must wait. Patient writes then go out, or the wait might never end."""
        return self.bytes > self.most_bytes

    def limit(self, most_bytes: int) -> None:
        """Change `most_bytes`."""
        with self._lock:
            self.most_bytes = most_bytes
            self._hand_over()

    def submit(self, write: Write, size: int, *, patient: bool = False) -> Future[None]:
        """Submit a write of `size` bytes. A patient one may wait for others; see `LogStore`."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # A submitted write cannot be cancelled, even if its waiter is.
        with self._lock:
            if self._closed:  # No thread is left to write.
                done.set_exception(StorageFailed("the log is closed: the service is shutting down"))
                return done
            self._waiting.append(Submitted(write, done, size))
            self.bytes += size + _WRITE_BYTES
            if not patient or self.full or len(self._waiting) == _WAITING_OPERATIONS:
                self._hand_over()
        return done

    def take(self) -> tuple[list[Submitted], bool]:
        """Wait for writes. Return a batch to write together, and whether it is the last."""
        batch, size = list[Submitted](), 0
        while (submitted := self._handed_over.get()) is not None:
            batch += submitted
            size += sum(each.size for each in submitted)
            if size >= _COMMIT_BYTES or len(batch) >= _COMMIT_OPERATIONS or self._handed_over.empty():
                return batch, False
        return batch, True

    def end(self, writes: Iterable[Submitted]) -> None:
        """Stop counting writes that are on disk or refused. Call this before their futures end."""
        size = sum(each.size + _WRITE_BYTES for each in writes)
        with self._lock:
            self.bytes -= size

    def close(self) -> None:
        """Accept no more writes."""
        with self._lock:
            self._closed = True
            self._hand_over()
            self._handed_over.put(None)

    def _hand_over(self) -> None:
        self._handed_over.put(self._waiting)
        self._waiting = []


def check_written(writes: Sequence[Future[None]]) -> None:
    """Raise the error of the first refused write. A pending one fails together with all later ones."""
    for write in writes:
        if write.done() and (error := write.exception()):
            raise error


class QueuedLog(ABC, Generic[B]):
    """The writing half of a `LogStore`: a queue, and a thread that adds its writes to batches of type `B`.

    Attributes: see `LogStore`.
    """

    def __init__(self) -> None:
        self.refusing, self.queue = False, WriteQueue()
        self._writer = threading.Thread(target=self._write_loop, name="log-writer", daemon=True)

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
        """Write a record from its pieces, unless a write in `after` was refused."""
        address = Address(stream, number, part, index)
        size = sum(memoryview(piece).nbytes for piece in payload)

        def write(batch: B) -> None:
            check_written(after)
            self._append(batch, address, payload, size)

        return self.queue.submit(write, size, patient=patient)

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Drop the records from `number` on, or only those of one part of `number`."""
        return self.queue.submit(lambda batch: self._drop(batch, stream, number, part), 0, patient=patient)

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Drop the records up to number `upto`."""
        return self.queue.submit(lambda batch: self._truncate(batch, stream, upto), 0)

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Write a small record, unless a write in `after` was refused; None deletes it."""
        return self.put_all({name: value}, after=after)

    def put_all(self, records: Mapping[str, bytes | None], *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Write several small records, all or none; None deletes one."""
        size = sum(len(name) + len(value or b"") for name, value in records.items())

        def write(batch: B) -> None:
            check_written(after)
            self._put(batch, records)

        return self.queue.submit(write, size)

    # The methods below run in the writer's thread.

    @abstractmethod
    def _append(self, batch: B, address: Address, payload: Sequence[Buffer], size: int) -> None: ...

    @abstractmethod
    def _drop(self, batch: B, stream: str, number: int, part: int | None) -> None: ...

    @abstractmethod
    def _truncate(self, batch: B, stream: str, upto: int) -> None: ...

    @abstractmethod
    def _put(self, batch: B, records: Mapping[str, bytes | None]) -> None: ...

    @abstractmethod
    def _write(self, submitted: list[Submitted]) -> None: ...

    def _write_loop(self) -> None:
        closing = False
        while not closing:
            submitted, closing = self.queue.take()
            self._write(submitted)
            del submitted  # Its closures refer to rows.
