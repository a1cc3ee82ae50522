"""A release: what a replica lacks, frozen at one point of a history."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary, ref

import numpy as np

from deltasync.core.id_sets import union
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.scratch import Room
from deltasync.wire.row_messages import chunk_rows, chunked, release_chunk, rows_in_chunk

# Of all releases together; beyond it they are kept in unlinked files, so that slow replicas cost no memory.
RELEASES_IN_MEMORY_BYTES = 64 << 20

_Lack = tuple[int, Repair, int]


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
    """

    number: int
    version: int
    step: int
    step_end_unix_ns: int
    event_time_unix_ns: int | None = None

    @classmethod
    def of(cls, seal: Seal, number: int | None = None) -> "Head":
        """The head that is made of a sealed version: that version itself, or the release of a number."""
        number = seal.version if number is None else number
        return cls(number, seal.version, seal.step, seal.step_end_unix_ns, seal.event_time_unix_ns)


@dataclass(frozen=True)
class Chunk:
    """Some rows of the table in `slot`, which are sent together.

    Attributes:
        slot: of the table.
        rows: the rows; views of the message where there is one.
        message: what is sent to every replica; None where it is written for each, so that it takes no memory.
    """

    slot: int
    rows: RowBatch
    message: bytes | None = None

    @classmethod
    def written(cls, slot: int, rows: RowBatch) -> "Chunk":
        """A chunk whose message is kept, instead of the rows."""
        message = release_chunk(slot, rows)
        return cls(slot, rows_in_chunk(message, rows), message)

    def sent(self, *, deletes: bool) -> tuple[bytes, int]:
        """The message, and its bytes of ids and values. Who does not know of `deletes` is sent rows of zeros."""
        if self.rows.deleted and not deletes:
            zeros = replace(self.rows, deleted=False)
            return release_chunk(self.slot, zeros), zeros.nbytes
        return self.message or release_chunk(self.slot, self.rows), self.rows.nbytes


@dataclass
class FrozenRelease:
    """Sorted ids and current values of every row that some replica lacks.

    Attributes:
        head: what a replica holds once it has applied this; None when nothing is published yet.
        chunks: the rows, each once, of tables in any order; those that are no more among them.
        repair: of which this holds all.
        checksums: of every table, by slot, as a replica at `head` holds it.
        memory_bytes: how much memory these take; 0 when they are in unlinked files.
    """

    head: Head | None
    chunks: list[Chunk] = field(default_factory=list)
    repair: Repair = NO_REPAIR
    checksums: tuple[int, ...] = ()
    memory_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(len(chunk.rows) for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, as they are sent to who knows of deletes."""
        return sum(chunk.rows.nbytes for chunk in self.chunks)


class Releases:
    """The releases of one set of tables. Replicas that lack the same rows share one while any of them uses it.

    Attributes:
        followed: somebody has asked for what the newest cut, or release, has brought.
    """

    def __init__(
        self,
        run: Callable[..., Awaitable[FrozenRelease]],
        state: Callable[[], tuple[Sequence[StampedTable], Head | None]],
        scratch: Path,
    ) -> None:
        """`run` runs a function on the thread that changes the tables, where `state` returns them and the head."""
        self._run = run
        self._state = state
        self._scratch = scratch
        self._frozen: list[ref[FrozenRelease]] = []  # Used on that thread.
        self._tasks: WeakValueDictionary[_Lack, asyncio.Future[FrozenRelease]] = WeakValueDictionary()
        self._newest: asyncio.Future[FrozenRelease] | None = None
        self._once = False
        self.followed = False

    def get(self, after: int, repair: Repair, head: int) -> asyncio.Future[FrozenRelease]:
        """The rows stamped after `after`, and those of a repair, while the head is `head`."""
        lack = (after, repair, head)
        self.followed |= after == head - 1
        task = self._tasks.get(lack)
        if task is None or _failed(task):
            task = self._tasks[lack] = asyncio.create_task(self._get(after, repair))
        if self._once and task is self._newest:
            self._newest = None
        return task

    def have(self, release: FrozenRelease | None, head: int, *, once: bool = False) -> None:
        """Have what a replica at the number before `head` lacks, which was made of the rows that came with `head`:
        until the next one, or, `once`, until a replica takes it, and as long as any uses it.
        """
        self._newest, self._once, self.followed = None, once, False
        if release:
            self._newest = self._tasks[head - 1, NO_REPAIR, head] = asyncio.get_running_loop().create_future()
            self._newest.set_result(release)

    def drop_newest(self) -> None:
        """Keep nothing that no replica uses."""
        self._newest = None

    async def _get(self, after: int, repair: Repair) -> FrozenRelease:
        return await self._run(self._freeze, after, repair)

    def _freeze(self, after: int, repair: Repair) -> FrozenRelease:
        tables, head = self._state()
        return self._noted(freeze(tables, after, head, self._scratch, self._room(), repair))

    # On the thread that changes the tables.

    def prepared(self, rows: Sequence[tuple[int, RowBatch]]) -> FrozenRelease | None:
        """What a replica will lack that is at the number that the tables are at, before these get the rows of the
        next one, by slot: to be `completed` then. None if there is no memory for it.
        """
        size = sum(batch.nbytes for _, batch in rows)
        if size > self._room():
            return None
        chunks = [Chunk.written(slot, piece) for slot, batch in rows for piece in chunked(batch)]
        return self._noted(FrozenRelease(None, chunks, memory_bytes=size))

    def completed(self, release: FrozenRelease) -> FrozenRelease:
        """What was `prepared`, now that the tables have these rows."""
        tables, release.head = self._state()
        release.checksums = _checksums(tables)
        return release

    def _room(self) -> int:
        """How much memory a release may take now, bytes."""
        self._frozen = [each for each in self._frozen if each()]
        return RELEASES_IN_MEMORY_BYTES - sum(release.memory_bytes for each in self._frozen if (release := each()))

    def _noted(self, release: FrozenRelease) -> FrozenRelease:
        self._frozen.append(ref(release))
        return release


def _failed(task: asyncio.Future[FrozenRelease]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def freeze(
    tables: Sequence[StampedTable],
    after: int,
    head: Head | None,
    scratch: Path,
    memory_bytes: int,
    repair: Repair = NO_REPAIR,
) -> FrozenRelease:
    """Copy every row stamped after `after`, and those of a repair. Not while any row changes.

    Who holds nothing of a table need not know what is deleted in it.

    A release of more than `memory_bytes` is kept in an unlinked file in the folder `scratch`.
    """
    changed = [
        _split(table, 0 if slot in repair.whole else after, repair.rows.get(slot))
        for slot, table in enumerate(tables)
    ]
    pairs = list(zip(tables, changed, strict=True))
    total = sum(len(ids) * table.spec.row_bytes + gone.nbytes for table, (ids, gone) in pairs)
    spill = total > memory_bytes
    room = _spilling_room(pairs, scratch) if spill else None
    chunks = [
        chunk
        for slot, (table, (ids, gone)) in enumerate(pairs)
        for chunk in (_spilled(slot, table, ids, gone, room) if room else _written(slot, table, ids, gone))
    ]
    release = FrozenRelease(head, chunks, repair, _checksums(tables), 0 if spill else total)
    if spill:
        weakref.finalize(release, _free_elsewhere, chunks).atexit = False
    return release


def _checksums(tables: Sequence[StampedTable]) -> tuple[int, ...]:
    return tuple(table.checksum for table in tables)


def _split(table: StampedTable, after: int, others: Ids | None) -> tuple[Ids, Ids]:
    """The rows stamped after `after`, and others: those that are there, and those that are not."""
    ids = table.changed_since(after)
    if others is not None:
        ids = union(ids, others[: np.searchsorted(others, table.spec.rows)])
    deleted = table.stamps[ids] <= 0
    if not deleted.any():
        return ids, ids[:0]
    return ids[~deleted], ids[deleted & (after > 0)]


def _written(slot: int, table: StampedTable, ids: Ids, gone: Ids) -> Iterator[Chunk]:
    """Some rows as they are now, and others that are no more, in memory."""
    spec, size = table.spec, chunk_rows(table.spec.row_bytes)
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        yield Chunk.written(slot, table.read(some, np.empty((len(some), spec.dim), spec.dtype)))
    yield from (Chunk.written(slot, piece) for piece in chunked(RowBatch.deletes(Shard.whole(spec), gone)))


def _spilling_room(tables: Iterable[tuple[StampedTable, tuple[Ids, Ids]]], scratch: Path) -> Room:
    """Room in an unlinked file for rows of some tables: those that are there, and the ids of others."""
    sizes = [
        (ids.nbytes, len(ids) * table.spec.dim * table.spec.dtype.itemsize, gone.nbytes)
        for table, (ids, gone) in tables
    ]
    return Room(chain(*sizes), scratch, f"a release of {len(sizes)} tables")


def _spilled(slot: int, table: StampedTable, ids: Ids, gone: Ids, room: Room) -> Iterator[Chunk]:
    """As `_written`, with the next of the room."""
    spec = table.spec
    if len(ids):
        rows = table.read(ids, room.array((len(ids), spec.dim), spec.dtype))
        yield from (Chunk(slot, piece) for piece in chunked(replace(rows, ids=_spilled_ids(ids, room))))
    if len(gone):
        deletes = RowBatch.deletes(Shard.whole(spec), _spilled_ids(gone, room))
        yield from (Chunk(slot, piece) for piece in chunked(deletes))


def _spilled_ids(ids: Ids, room: Room) -> Ids:
    spilled = room.array(ids.shape, ids.dtype)
    spilled[:] = ids
    return spilled


def _free_elsewhere(chunks: list[Chunk]) -> None:
    """Free what nobody uses any more in a thread: the event loop does not wait while gigabytes are unmapped."""
    threading.Thread(target=chunks.clear, name="release-freeing", daemon=True).start()
