"""The log, as the service uses it: the truth that everything else can be rebuilt from.

It has streams of records, and small records by name. A stream is called, say, `cuts/clicks`, and its records have
an address: number, part, index, in this order. A small record is called, say, `consumer/mobile`, and is replaced
as a whole. Writes reach the disk in the order in which they were submitted, each by itself or several together:
one that is on disk shows that those before it are, as far as they were not refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltasync.core.durations import Durations
from deltasync.core.errors import StorageFailed
from deltasync.storage.volume import Volume
from deltasync.storage.write_queue import WriteQueue

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
