"""Releases: the rows that bring a receiver from one position to a later one, frozen or copied in blocks."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np

from deltasync.base.errors import Damaged, ServiceUnavailable, Superseded
from deltasync.base.waiting import Signal, first_of
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.wire.row_messages import at_end_of, chunk_rows, chunked, release_chunk

NO_TABLES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Head:
    """The newest point of a history.

    Attributes:
        number: what replicas that have everything hold: a version, or the number of a release.
        version: the version whose rows it is made of.
        step: the trainer's step of that version.
        step_end_unix_ns: when that step ended, nanoseconds since 1970.
        event_time_unix_ns: the time of the newest event that the model had been trained on, likewise; None if
            nobody has said it.
        seal: the checksum of the version's or the release's seal; 0 where it is not known.
    """

    number: int
    version: int
    step: int
    step_end_unix_ns: int
    event_time_unix_ns: int | None = None
    seal: int = 0

    @classmethod
    def of(cls, seal: Seal, number: int | None = None) -> "Head":
        """The head that is made of a sealed version: that version itself, or the release of a number."""
        checksum = seal.checksum if number is None else 0
        number = seal.version if number is None else number
        return cls(number, seal.version, seal.step, seal.step_end_unix_ns, seal.event_time_unix_ns, checksum)


@dataclass
class ReleaseChunk:
    """Some rows of the table in `slot`, which are sent together.

    Attributes:
        slot: of the table.
        rows: the rows, as views of the bytes in which they were published, or of the message.
    """

    slot: int
    rows: RowBatch
    _message: bytes | None = None

    @classmethod
    def of(cls, slot: int, rows: RowBatch) -> "ReleaseChunk":
        """A chunk of some rows; unless they came in a message, they are copied into theirs."""
        chunk = cls(slot, rows)
        if rows.encoded is None:
            chunk._write()
        return chunk

    @property
    def message(self) -> bytes:
        """What is sent to every replica, unless the release goes whole. It is written once."""
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
    """Ids and current values of rows that a replica lacks, at one moment: all of them, or those still to be sent.

    Attributes:
        head: what a replica holds once it has applied this; None when nothing is published yet.
        chunks: the rows, deleted ones too, of tables in any order. Of a row that comes twice the last one counts.
        whole: slots of the tables of which this holds every row, and that are reset before.
        checksums: of every table, by slot, as a replica at `head` holds it.
        rows_before: rows that were sent before as a part of this release.
    """

    head: Head | None
    chunks: list[ReleaseChunk] = field(default_factory=list)
    whole: frozenset[int] = NO_TABLES
    checksums: tuple[int, ...] = ()
    rows_before: int = 0

    @property
    def rows(self) -> int:
        """Rows of all tables together, with those that were sent before."""
        return self.rows_before + sum(len(chunk.rows) for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values of its chunks: they take as much memory."""
        return sum(chunk.nbytes for chunk in self.chunks)


def freeze(
    tables: Sequence[StampedTable], after: int, head: Head | None, whole: frozenset[int] = NO_TABLES
) -> FrozenRelease:
    """Copy every row that a replica lacks. On the thread that changes the tables.

    Args:
        tables: the tables, by slot.
        after: the number that the replica is at.
        head: what it holds then.
        whole: slots of tables of which it lacks every row.

    Raises:
        DamagedRows: some do not fit their digests.
    """
    chunks = [
        chunk
        for slot, (table, number) in enumerate(zip(tables, numbers_after(tables, after, whole), strict=True))
        # A replica that holds nothing of a table need not know which rows are gone.
        for chunk in copied(slot, table, table.changed_since(number), 0 if number else table.counts.newest)
    ]
    return FrozenRelease(head, chunks, whole | replacing(tables, after), checksums_of(tables))


def copied(slot: int, table: StampedTable, ids: Ids, told_after: int) -> Iterator[ReleaseChunk]:
    """The rows `ids` ([n], ascending) of a table as they are now: first those that are there, then those that were
    deleted after the number `told_after`.

    Raises:
        DamagedRows: some do not fit their digests.
    """
    spec, deleted = table.spec, table.deleted(ids)
    live, gone = ids[~deleted], ids[deleted]
    size = chunk_rows(spec.row_bytes)
    for start in range(0, len(live), size):
        some = live[start : start + size]
        read = table.read(some, np.empty((len(some), spec.dim), spec.dtype))
        # Replicas may hold other bits than are sent, of which the digests are.
        yield ReleaseChunk.of(slot, replace(read, digests=None))
    told = gone[table.numbers(gone) > told_after]
    yield from (ReleaseChunk.of(slot, piece) for piece in chunked(RowBatch.deletes(Shard.whole(spec), told)))


def checksums_of(tables: Sequence[StampedTable]) -> tuple[int, ...]:
    """Checksums of tables, by slot."""
    return tuple(table.checksum for table in tables)


def numbers_after(tables: Sequence[StampedTable], after: int, whole: Collection[int]) -> list[int]:
    """The number after which a replica at `after` lacks rows, by slot: 0 for the tables `whole`."""
    return [0 if slot in whole else after for slot in range(len(tables))]


def replacing(tables: Sequence[StampedTable], after: int) -> frozenset[int]:
    """Slots of the tables in the place of which a replica at `after` may hold others that were removed: it lacks
    all of their rows, and is to reset them.
    """
    return frozenset(slot for slot, table in enumerate(tables) if 0 < after <= table.removed_before)


def size_after(tables: Sequence[StampedTable], after: int, whole: Collection[int] = NO_TABLES) -> int:
    """Bytes of what a replica at `after` lacks, without a look at the rows: about, and never too few."""
    return sum(
        table.counts.after(number) * table.spec.row_bytes
        for table, number in zip(tables, numbers_after(tables, after, whole), strict=True)
    )


# Copied at a time for one replica: the tables change in between. A release of this size is always frozen, so that
# replicas that keep the memory for releases do not hold up others.
BLOCK_BYTES = 4 << 20
# How often tables that nobody may be given are looked at, beside each time that they move on.
_LOOK_SECONDS = 5.0

# The tables by slot, and what a replica holds that has all of their rows. None while nobody may be given these.
State: TypeAlias = tuple[Sequence[StampedTable], Head | None]
Run: TypeAlias = Callable[..., Awaitable[Any]]
Release: TypeAlias = "FrozenRelease | LargeRelease"

_Key = tuple[int, frozenset[int], int]
T = TypeVar("T")


class Releases:
    """The releases of one set of tables.

    Attributes:
        followed: somebody has asked for what the newest cut, or release, has brought.
    """

    def __init__(self, run: Run, state: Callable[[], State | None], memory_bytes: int) -> None:
        """`run` runs a function on the thread that changes the tables, where `state` returns them and the head;
        `memory_bytes` is for all releases that are frozen at a time.
        """
        self._run = run
        self._state = state
        self._memory_bytes = memory_bytes
        self._frozen: list[ref[FrozenRelease]] = []
        self._found: WeakValueDictionary[_Key, asyncio.Future[Release]] = WeakValueDictionary()
        self._tasks = set[asyncio.Task[None]]()
        self._newest: asyncio.Future[Release] | None = None
        self._moved, self._moves = Signal(), 0
        self.followed = False

    def get(self, after: int, whole: frozenset[int], head: int) -> asyncio.Future[Release]:
        """What a replica at `after` lacks while the head is `head`, with every row of the tables `whole`."""
        key = (after, whole, head)
        self.followed |= after == head - 1
        found = self._found.get(key)
        if found is None or _failed(found):
            found = self._found[key] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._find(ref(found), after, whole))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return found

    def have(self, release: FrozenRelease | None, head: int) -> None:
        """Note that the head is `head`. Replicas at the number before it are sent `release`.

        It is kept until the next call, and as long as a replica uses it.
        """
        self._newest, self.followed = None, False
        if release:
            self._newest = self._found[head - 1, NO_TABLES, head] = asyncio.get_running_loop().create_future()
            self._newest.set_result(release)
        self._wake()

    def forget(self) -> None:
        """Have nothing ready that was made of other tables than there are now."""
        self._found.clear()
        self._newest, self.followed = None, False
        self._wake()

    def _wake(self) -> None:
        self._moves += 1
        self._moved.wake()

    async def _find(self, wanted: "ref[asyncio.Future[Release]]", after: int, whole: frozenset[int]) -> None:
        try:
            release = await self.read(
                lambda state: self._release(state, after, whole), lambda: wanted() is not None
            )
        except Exception as error:  # noqa: BLE001  # handed over to whoever waits for the release
            if (found := wanted()) and not found.done():
                found.set_exception(error)
        else:
            if (found := wanted()) and not found.done():
                found.set_result(release)

    async def read(self, reading: Callable[[State], T], wanted: Callable[[], bool] = lambda: True) -> T:
        """What a function finds in the tables, as soon as replicas may be given these; while it is `wanted`.

        Raises:
            ServiceUnavailable: it is wanted no more, or the tables are closed.
        """

        def look() -> tuple[T] | None:
            state = self._state()
            return None if state is None else (reading(state),)

        while wanted():
            moves = self._moves
            found: tuple[T] | None = await self._run(look)
            if found is not None:
                return found[0]
            if moves == self._moves:
                await first_of(self._moved.changed(), seconds=_LOOK_SECONDS)
        raise ServiceUnavailable("nobody waits for this release any more")

    # On the thread that changes the tables.

    def _release(self, state: State, after: int, whole: frozenset[int]) -> Release:
        tables, head = state
        if size_after(tables, after, whole) > max(self.room, BLOCK_BYTES):
            return LargeRelease(self, after, whole)
        return self.noted(freeze(tables, after, head, whole))

    def prepared(self, rows: Sequence[tuple[int, RowBatch]]) -> FrozenRelease | None:
        """A release of rows, by slot, that the tables are about to get; None if there is no memory.

        `completed` makes them the next release, for replicas that have everything before it.
        """
        if sum(batch.nbytes for _, batch in rows) > self.room:
            return None
        return self.noted(
            FrozenRelease(None, [ReleaseChunk.of(slot, piece) for slot, batch in rows for piece in chunked(batch)])
        )

    def completed(
        self, release: FrozenRelease, tables: Sequence[StampedTable], head: Head
    ) -> FrozenRelease | None:
        """What was `prepared`, now that the tables have these rows.

        None if bits of them have changed in memory since they were received: replicas would refuse them for ever.
        What they are sent instead is read from the tables, and checked as it is read.
        """
        try:
            for chunk in release.chunks:
                chunk.rows.check_digests()
        except Damaged:
            return None
        release.head, release.checksums = head, checksums_of(tables)
        release.whole = replacing(tables, head.number - 1)
        return release

    @property
    def room(self) -> int:
        """How much memory is left for releases: bytes, less than 0 where they take more than they should."""
        live = [release for each in self._frozen if (release := each())]
        self._frozen = [ref(release) for release in live]
        return self._memory_bytes - sum(release.nbytes for release in live)

    def noted(self, release: FrozenRelease) -> FrozenRelease:
        """The same; it takes memory as long as somebody uses it."""
        self._frozen.append(ref(release))
        return release


class LargeRelease:
    """What replicas lack where it does not fit into the memory for releases: each begins to copy it on its own."""

    def __init__(self, releases: Releases, after: int, whole: frozenset[int]) -> None:
        self._releases, self._after, self._whole = releases, after, whole

    def begin(self) -> "Copying":
        """Begin to copy it, for one replica."""
        return Copying(self._releases, self._after, self._whole)


class Copying:
    """A large release on its way to one replica.

    Rows that change after they were copied are copied again: of those that come twice the last one counts. Blocks
    are worth nothing without the end, which makes them the rows of one version.
    """

    def __init__(self, releases: Releases, after: int, whole: frozenset[int]) -> None:
        self._releases, self._after, self._whole = releases, after, whole
        self._copying: PreCopy | None = None
        self._tables: Sequence[StampedTable] = ()
        self._specs: list[TableSpec] = []
        self._told_after: list[int] = []
        self._rows = 0

    async def next(self) -> list[ReleaseChunk] | FrozenRelease:
        """The next rows, a few MB; last the rest, as a release with the head and the checksums of all.

        Raises:
            Superseded: there are other tables than in the beginning.
            DamagedRows: some do not fit their digests.
        """
        return await self._releases.read(self._next)

    def _next(self, state: State) -> list[ReleaseChunk] | FrozenRelease:
        tables, head = state
        specs = [table.spec for table in tables]
        if self._copying is None:
            numbers = numbers_after(tables, self._after, self._whole)
            self._tables, self._specs = list(tables), specs
            # A replica that lacks a whole table need not hear of rows that were deleted before. It has to hear of
            # those that are deleted from now on, since it may have been sent them by then.
            self._told_after = [
                0 if number else table.counts.newest for table, number in zip(tables, numbers, strict=True)
            ]
            self._copying = PreCopy(tables, numbers, BLOCK_BYTES)
        elif self._tables != list(tables) or self._specs != specs:
            raise Superseded("the tables have changed while they were sent; reconnect")
        return self._block(self._copying, tables, head)

    def _block(
        self, copying: PreCopy, tables: Sequence[StampedTable], head: Head | None
    ) -> list[ReleaseChunk] | FrozenRelease:
        chunks, size = list[ReleaseChunk](), 0
        while size < BLOCK_BYTES:
            block = copying.next_block(BLOCK_BYTES - size)
            if block is None:
                # Where rows change as fast as the replica takes them, the rest is frozen although it is large: but
                # not while other releases take all the memory that there is for them.
                if copying.left_bytes <= BLOCK_BYTES or self._releases.room > 0:
                    return self._rest(copying, tables, head, chunks)
                continue
            chunks += self._copied(tables, *block)
            size += len(block[1]) * tables[block[0]].spec.row_bytes
        self._rows += sum(len(chunk.rows) for chunk in chunks)
        return chunks

    def _rest(
        self, copying: PreCopy, tables: Sequence[StampedTable], head: Head | None, chunks: list[ReleaseChunk]
    ) -> FrozenRelease:
        """The end of the release: chunks that were copied just now, and all rows that are left."""
        chunks += [chunk for slot, ids in copying.rest() for chunk in self._copied(tables, slot, ids)]
        whole = self._whole | replacing(tables, self._after)
        return self._releases.noted(FrozenRelease(head, chunks, whole, checksums_of(tables), self._rows))

    def _copied(self, tables: Sequence[StampedTable], slot: int, ids: Ids) -> list[ReleaseChunk]:
        return list(copied(slot, tables[slot], ids, self._told_after[slot]))


def _failed(found: asyncio.Future[Release]) -> bool:
    return found.done() and (found.cancelled() or found.exception() is not None)
