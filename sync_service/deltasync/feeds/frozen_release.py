"""A release: what a replica lacks, frozen at one point of a history."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.lack import Lack, LackOfTable, replacing
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.scratch import Room
from deltasync.wire.row_messages import chunk_rows, chunked, release_chunk, rows_in_chunk


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

    def sent(self) -> tuple[bytes, int]:
        """The message, and its bytes of ids and values."""
        return self.message or release_chunk(self.slot, self.rows), self.rows.nbytes


@dataclass
class FrozenRelease:
    """Sorted ids and current values of every row that some replica lacks.

    Values are absolute: whoever holds a number that it `serves`, and so lacks fewer rows, may be sent all of them.

    Attributes:
        head: what a replica holds once it has applied this; None when nothing is published yet.
        chunks: the rows, each once, of tables in any order; those that are no more among them.
        repair: of which this holds all.
        whole: slots of the tables of which this holds every row, and that are reset before.
        checksums: of every table, by slot, as a replica at `head` holds it.
        memory_bytes: how much memory these take; 0 when they are in unlinked files.
        spilled_bytes: how much they take there.
        serves: the numbers at which a replica lacks no other rows up to `head`.
        specs: of the tables, by slot; () of one that is in memory.
        wanted_back: others have waited for its room for long: who is sent it for long is to give it up.
        made: when, seconds by `time.monotonic`.
    """

    head: Head | None
    chunks: list[Chunk] = field(default_factory=list)
    repair: Repair = NO_REPAIR
    whole: frozenset[int] = frozenset()
    checksums: tuple[int, ...] = ()
    memory_bytes: int = 0
    spilled_bytes: int = 0
    serves: range = range(0)
    specs: Sequence[TableSpec] = ()
    wanted_back: bool = False
    made: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(len(chunk.rows) for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, as they are sent."""
        return sum(chunk.rows.nbytes for chunk in self.chunks)


def freeze(
    lack: Lack, head: Head | None, scratch: Path | None = None, freed: Callable[[int], None] | None = None
) -> FrozenRelease:
    """Copy every row of a lack. Not while any row changes.

    Args:
        lack: the rows.
        head: what who has them holds.
        scratch: the folder where an unlinked file keeps them; None = they are kept in memory.
        freed: called in a thread, with its bytes, once such a file is free again.
    """
    room = _spilling_room(lack, scratch) if scratch and lack.nbytes else None
    chunks = [
        chunk
        for slot, each in enumerate(lack.tables)
        for chunk in (_spilled(slot, each, room) if room else _written(slot, each))
    ]
    tables = [each.table for each in lack.tables]
    checksums, whole = checksums_of(tables), lack.repair.whole | replacing(tables, lack.after)
    if room is None:
        return FrozenRelease(head, chunks, lack.repair, whole, checksums, lack.nbytes)
    release = FrozenRelease(
        head,
        chunks,
        lack.repair,
        whole,
        checksums,
        spilled_bytes=lack.nbytes,
        serves=lack.serves(head.number if head else 0),
        specs=[table.spec for table in tables],
    )
    weakref.finalize(release, _free_elsewhere, chunks, lack.nbytes, freed).atexit = False
    return release


def checksums_of(tables: Sequence[StampedTable]) -> tuple[int, ...]:
    """Checksums of tables, by slot."""
    return tuple(table.checksum for table in tables)


def _written(slot: int, lack: LackOfTable) -> Iterator[Chunk]:
    """The rows of a table that are there, as they are now, and those that are no more, in memory."""
    table, spec, size = lack.table, lack.table.spec, chunk_rows(lack.table.spec.row_bytes)
    for start in range(0, len(lack.ids), size):
        some = lack.ids[start : start + size]
        yield Chunk.written(slot, table.read(some, np.empty((len(some), spec.dim), spec.dtype)))
    yield from (Chunk.written(slot, piece) for piece in chunked(RowBatch.deletes(Shard.whole(spec), lack.gone)))


def _spilling_room(lack: Lack, scratch: Path) -> Room:
    """Room in an unlinked file for the rows of a lack: those that are there, and the ids of others."""
    sizes = [
        (each.ids.nbytes, len(each.ids) * each.table.spec.dim * each.table.spec.dtype.itemsize, each.gone.nbytes)
        for each in lack.tables
    ]
    return Room(chain(*sizes), scratch, f"a release of {len(sizes)} tables")


def _spilled(slot: int, lack: LackOfTable, room: Room) -> Iterator[Chunk]:
    """As `_written`, with the next of the room."""
    spec, ids, gone = lack.table.spec, lack.ids, lack.gone
    if len(ids):
        rows = lack.table.read(ids, room.array((len(ids), spec.dim), spec.dtype))
        yield from (Chunk(slot, piece) for piece in chunked(replace(rows, ids=_spilled_ids(ids, room))))
    if len(gone):
        deletes = RowBatch.deletes(Shard.whole(spec), _spilled_ids(gone, room))
        yield from (Chunk(slot, piece) for piece in chunked(deletes))


def _spilled_ids(ids: Ids, room: Room) -> Ids:
    spilled = room.array(ids.shape, ids.dtype)
    spilled[:] = ids
    return spilled


def _free_elsewhere(chunks: list[Chunk], size: int, freed: Callable[[int], None] | None) -> None:
    """Free what nobody uses any more in a thread: the event loop does not wait while gigabytes are unmapped."""

    def free() -> None:
        chunks.clear()
        if freed:
            freed(size)

    threading.Thread(target=free, name="release-freeing", daemon=True).start()
