"""Releases: the rows that bring a receiver from one position to a later one, frozen or copied in blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np

from deltasync.base.errors import ServiceUnavailable, Superseded
from deltasync.base.waiting import Signal, first_of
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import checksums_to_message
from deltasync.wire.row_messages import at_end_of, chunk_rows, chunked, release_chunk, table_pieces

NO_TABLES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Head:
    """The newest position in a history.

    Attributes:
        number: the number of an up-to-date replica: a version, or the number of a release.
        version: the version from which its rows come.
        step_end_unix_ns: when that step ended, nanoseconds since 1970.
        event_time_unix_ns: the time of the newest event on which the model was trained, nanoseconds since 1970;
            None if unknown.
        seal: the checksum of the seal of the version or release; 0 if unknown.
        rows: number of rows of that version or release alone.
        bytes: bytes of their ids and values.
        kept: the name of the kept version that replicas must hold; empty for the newest version, or without one.
    """

    number: int
    version: int
    step: int
    step_end_unix_ns: int
    event_time_unix_ns: int | None = None
    seal: int = 0
    rows: int = 0
    bytes: int = 0
    kept: str = ""

    @classmethod
    def of(cls, seal: Seal, number: int | None = None) -> "Head":
        """The head for a sealed version: the version itself, or the release with a number."""
        head = cls(seal.version, seal.version, seal.step, seal.step_end_unix_ns, seal.event_time_unix_ns)
        if number is None:
            return replace(head, seal=seal.checksum, rows=seal.rows, bytes=seal.bytes)
        return replace(head, number=number)


@dataclass
class ReleaseChunk:
    """Rows of the table in `slot` that are sent together.

    Attributes:
        rows: the rows, as views of the bytes in which they were published, or of the message.
    """

    slot: int
    rows: RowBatch
    _message: bytes | None = None

    @classmethod
    def of(cls, slot: int, rows: RowBatch) -> "ReleaseChunk":
        """A chunk of rows, copied into a message unless they arrived in one."""
        chunk = cls(slot, rows)
        if rows.encoded is None:
            chunk._write()
        return chunk

    @property
    def message(self) -> bytes:
        """The message for every replica, encoded once; unused if the release is sent as one message."""
        return self._message or self._write()

    def _write(self) -> bytes:
        self._message = release_chunk(self.slot, self.rows)
        self.rows = at_end_of(self._message, self.rows)
        return self._message

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return self.rows.nbytes


@dataclass
class FrozenRelease:
    """Row ids and values that a replica lacks, at one moment: all of them, or the rest.

    Attributes:
        head: the replica's position after applying it; None if nothing is published yet.
        chunks: rows of the tables in any order, including deletes. If a row occurs twice, the last one counts.
        whole: slots of the tables with all their rows here; replicas reset these first.
        checksums: the checksum of every table by slot, as replicas at `head` hold it.
        rows_before: number of rows of this release that were sent earlier.
    """

    head: Head | None
    chunks: list[ReleaseChunk] = field(default_factory=list)
    whole: frozenset[int] = NO_TABLES
    checksums: tuple[int, ...] = ()
    rows_before: int = 0
    _table_rows: bytes = b""

    # Every replica reads the properties of a release, which has many chunks if the model has many tables.

    @cached_property
    def rows(self) -> int:
        """Number of rows of all tables, including those sent earlier."""
        return self.rows_before + sum(len(chunk.rows) for chunk in self.chunks)

    @cached_property
    def nbytes(self) -> int:
        """Size of ids and values in its chunks, in bytes."""
        return sum(chunk.rows.nbytes for chunk in self.chunks)

    @cached_property
    def message_bytes(self) -> int:
        """Size of ids, digests and values in its chunks, in bytes, in messages."""
        return sum(chunk.rows.message_bytes for chunk in self.chunks)

    @property
    def memory_bytes(self) -> int:
        """Size of its rows in memory, in bytes, with `table_rows` once that is encoded."""
        return self.message_bytes + len(self._table_rows)

    @property
    def table_rows(self) -> bytes:
        """The rows of its `WholeRelease`, encoded once for all replicas; unused if it is sent in chunks."""
        if not self._table_rows:
            self._table_rows = b"".join(table_pieces((chunk.slot, chunk.rows) for chunk in self.chunks))
        return self._table_rows

    @cached_property
    def end(self) -> bytes:
        """The fields of its `ReleaseEnd` that are equal for all replicas, encoded once; none without a head."""
        if (head := self.head) is None:
            return b""
        end = subscribe_pb2.ReleaseEnd(
            step=head.step,
            step_end_unix_ns=head.step_end_unix_ns,
            rows=self.rows,
            version=head.version,
            whole=sorted(self.whole),
            sums=checksums_to_message(dict(enumerate(self.checksums))),
            event_time_unix_ns=head.event_time_unix_ns or 0,
            kept=head.kept,
        )
        return end.SerializeToString()


def freeze(
    tables: Sequence[StampedTable], after: int, head: Head | None, whole: frozenset[int] = NO_TABLES
) -> FrozenRelease:
    """Copy every row that a replica at `after` lacks, all of them for the tables `whole`. `head` is its position
    afterwards. Call it on the thread that changes the tables.
    """
    chunks = [
        chunk
        for slot, (table, number) in enumerate(zip(tables, numbers_after(tables, after, whole), strict=True))
        # A replica without any rows of a table needs no deletes.
        for chunk in copied(slot, table, table.changed_since(number), 0 if number else table.counts.newest)
    ]
    return FrozenRelease(head, chunks, whole | replacing(tables, after), checksums_of(tables))


def copied(slot: int, table: StampedTable, ids: Ids, told_after: int) -> Iterator[ReleaseChunk]:
    """Copy rows `ids` ([n], ascending) of a table: first live rows, then deletes after number `told_after`."""
    spec, deleted = table.spec, table.deleted(ids)
    live, gone = ids[~deleted], ids[deleted]
    size = chunk_rows(spec.row_bytes)
    for start in range(0, len(live), size):
        some = live[start : start + size]
        read = table.read(some, np.empty((len(some), spec.dim), spec.dtype))
        # The digests are of the rows as replicas hold them, which may differ from the rows as sent.
        yield ReleaseChunk.of(slot, replace(read, digests=None))
    told = gone[table.numbers(gone) > told_after]
    yield from (ReleaseChunk.of(slot, piece) for piece in chunked(RowBatch.deletes(Shard.whole(spec), told)))


def checksums_of(tables: Sequence[StampedTable]) -> tuple[int, ...]:
    """The checksums of tables, by slot."""
    return tuple(table.checksum for table in tables)


def numbers_after(tables: Sequence[StampedTable], after: int, whole: Collection[int]) -> list[int]:
    """The number after which a replica at `after` lacks rows, by slot; 0 for the tables in `whole`."""
    return [0 if slot in whole else after for slot in range(len(tables))]


def replacing(tables: Sequence[StampedTable], after: int) -> frozenset[int]:
    """Slots of tables that replaced a removed table which a replica at `after` may hold. It lacks all rows of the
    new table, and resets the old one.
    """
    return frozenset(slot for slot, table in enumerate(tables) if 0 < after <= table.removed_before)


def size_after(tables: Sequence[StampedTable], after: int, whole: Collection[int] = NO_TABLES) -> int:
    """Upper bound of the bytes that a replica at `after` lacks, estimated without reading rows."""
    return sum(
        table.counts.after(number) * table.spec.row_bytes
        for table, number in zip(tables, numbers_after(tables, after, whole), strict=True)
    )


# Bytes copied at a time for one replica; the tables change in between. A release up to this size is always frozen,
# so that replicas which use up the memory for releases do not block others.
BLOCK_BYTES = 4 << 20
# Interval for checking whether tables can be sent, in addition to a check after each change.
_LOOK_SECONDS = 5.0

# The tables by slot, and the head of a replica with all their rows. None while replicas may not get them.
State: TypeAlias = tuple[Sequence[StampedTable], Head | None]
Run: TypeAlias = Callable[..., Awaitable[Any]]
Release: TypeAlias = "FrozenRelease | LargeRelease"

# What `Releases.get` was asked for. Replicas with equal keys share a release.
_Key = tuple[int, frozenset[int], int]
T = TypeVar("T")


def _next_key(head: int) -> _Key:
    """The key of replicas at the number before `head`. Their release can be made of the cut or release alone."""
    return head - 1, NO_TABLES, head


class Releases:
    """The releases of a set of tables.

    Attributes:
        followed: whether a replica has requested the rows of the newest cut or release.
    """

    def __init__(
        self, run: Run, state: Callable[[], State | None], memory_bytes: int, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """`run` runs a function on the thread that changes the tables, on which `state` returns them and the head;
        `memory_bytes` limits all frozen releases together, and a large one is copied in blocks of `block_bytes`.
        """
        self.block_bytes = block_bytes
        self._run = run
        self._state = state
        self._memory_bytes = memory_bytes
        self._frozen: list[ref[FrozenRelease]] = []
        self._ready: WeakValueDictionary[_Key, asyncio.Future[Release]] = WeakValueDictionary()
        self._tasks = set[asyncio.Task[None]]()
        self._newest: asyncio.Future[Release] | None = None
        self._moved, self._moves = Signal(), 0
        self.followed = False

    def get(self, after: int, whole: frozenset[int], head: int) -> asyncio.Future[Release]:
        """The rows of `head` that a replica at `after` lacks, with every row of the tables `whole`."""
        key = (after, whole, head)
        self.followed |= key == _next_key(head)
        future = self._ready.get(key)
        if future is None or _failed(future):
            future = self._ready[key] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._make(ref(future), after, whole))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return future

    def have(self, release: FrozenRelease | None, head: int) -> None:
        """Set the head. Replicas at the number before it get `release`.

        The release is kept until the next call, and while a replica uses it.
        """
        self._newest, self.followed = None, False
        if release:
            self._newest = self._ready[_next_key(head)] = asyncio.get_running_loop().create_future()
            self._newest.set_result(release)
        self._wake()

    def forget(self) -> None:
        """Drop all releases because the tables changed."""
        self._ready.clear()
        self._newest, self.followed = None, False
        self._wake()

    def _wake(self) -> None:
        self._moves += 1
        self._moved.wake()

    async def _make(self, waiting: "ref[asyncio.Future[Release]]", after: int, whole: frozenset[int]) -> None:
        try:
            release = await self.read(partial(self._release, after, whole), waiting)
        except Exception as error:  # noqa: BLE001  # handed over to the task that waits for the release
            if (future := waiting()) and not future.done():
                future.set_exception(error)
        else:
            if (future := waiting()) and not future.done():
                future.set_result(release)

    async def read(self, reading: Callable[[State], T], waiting: Callable[[], object] | None = None) -> T:
        """Read from the tables, as soon as replicas may get them; `waiting` returns None once nobody waits."""

        def look() -> tuple[T] | None:
            state = self._state()
            return None if state is None else (reading(state),)

        while waiting is None or waiting() is not None:
            moves = self._moves
            result: tuple[T] | None = await self._run(look)
            if result is not None:
                return result[0]
            if moves == self._moves:
                await first_of(self._moved.changed(), seconds=_LOOK_SECONDS)
        raise ServiceUnavailable("the replica no longer waits for this release")

    # The methods below run on the thread that changes the tables.

    def _release(self, after: int, whole: frozenset[int], state: State) -> Release:
        tables, head = state
        if size_after(tables, after, whole) > max(self.room, self.block_bytes):
            return LargeRelease(self, after, whole)
        return self.noted(freeze(tables, after, head, whole))

    def of_cut(
        self, rows: Sequence[tuple[int, RowBatch]], tables: Sequence[StampedTable], head: Head
    ) -> FrozenRelease | None:
        """The release of a cut to replicas at the position before `head`; None if memory is lacking.

        `rows` are all rows of the cut, by slot. The tables have them already.
        """
        if sum(batch.message_bytes for _, batch in rows) > self.room:
            return None
        chunks = [ReleaseChunk.of(slot, piece) for slot, batch in rows for piece in chunked(batch)]
        return self.noted(FrozenRelease(head, chunks, replacing(tables, head.number - 1), checksums_of(tables)))

    @property
    def room(self) -> int:
        """Memory left for releases, in bytes; negative if they exceed the limit."""
        live = [release for each in self._frozen if (release := each())]
        self._frozen = [ref(release) for release in live]
        return self._memory_bytes - sum(release.memory_bytes for release in live)

    def noted(self, release: FrozenRelease) -> FrozenRelease:
        """Count the memory of a release while it is in use, and return the release."""
        self._frozen.append(ref(release))
        return release


class LargeRelease:
    """A release that exceeds the memory for releases, so that it is copied for each replica separately."""

    def __init__(self, releases: Releases, after: int, whole: frozenset[int]) -> None:
        self._releases, self._after, self._whole = releases, after, whole

    def begin(self) -> "Copying":
        """Begin a copy for one replica."""
        return Copying(self._releases, self._after, self._whole)


class Copying:
    """The transfer of a large release to one replica.

    Rows that change after they were copied are copied again; the last copy counts. Blocks are useless without the
    end, which makes all rows consistent with one version.
    """

    def __init__(self, releases: Releases, after: int, whole: frozenset[int]) -> None:
        self._releases, self._after, self._whole = releases, after, whole
        self._copying: PreCopy | None = None
        self._tables: Sequence[StampedTable] = ()
        self._specs: list[TableSpec] = []
        self._told_after: list[int] = []
        self._rows = 0

    async def next(self) -> list[ReleaseChunk] | FrozenRelease:
        """The next rows, a few MB; at the end the rest, as a release with the head and all checksums."""
        return await self._releases.read(self._next)

    def _next(self, state: State) -> list[ReleaseChunk] | FrozenRelease:
        tables, head = state
        specs = [table.spec for table in tables]
        if self._copying is None:
            numbers = numbers_after(tables, self._after, self._whole)
            self._tables, self._specs = list(tables), specs
            # A replica that lacks a whole table needs no earlier deletes. It needs later ones, because it may have
            # received these rows in the meantime.
            self._told_after = [
                0 if number else table.counts.newest for table, number in zip(tables, numbers, strict=True)
            ]
            self._copying = PreCopy(tables, numbers, self._releases.block_bytes)
        elif self._tables != list(tables) or self._specs != specs:
            raise Superseded("the tables changed while they were being sent; reconnect")
        return self._block(self._copying, tables, head)

    def _block(
        self, copying: PreCopy, tables: Sequence[StampedTable], head: Head | None
    ) -> list[ReleaseChunk] | FrozenRelease:
        chunks, size, most = list[ReleaseChunk](), 0, self._releases.block_bytes
        while size < most:
            block = copying.next_block(most - size)
            if block is None:
                # If rows change as fast as the replica receives them, the rest is frozen although it is large,
                # unless other releases use all the memory for releases.
                if copying.left_bytes <= most or self._releases.room > 0:
                    return self._rest(copying, tables, head, chunks)
                continue
            chunks += self._copied(tables, *block)
            size += len(block[1]) * tables[block[0]].spec.row_bytes
        self._rows += sum(len(chunk.rows) for chunk in chunks)
        return chunks

    def _rest(
        self, copying: PreCopy, tables: Sequence[StampedTable], head: Head | None, chunks: list[ReleaseChunk]
    ) -> FrozenRelease:
        """The end of the release: `chunks` and all remaining rows."""
        chunks += [chunk for slot, ids in copying.rest() for chunk in self._copied(tables, slot, ids)]
        whole = self._whole | replacing(tables, self._after)
        return self._releases.noted(FrozenRelease(head, chunks, whole, checksums_of(tables), self._rows))

    def _copied(self, tables: Sequence[StampedTable], slot: int, ids: Ids) -> list[ReleaseChunk]:
        return list(copied(slot, tables[slot], ids, self._told_after[slot]))


def _failed(future: asyncio.Future[Release]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
