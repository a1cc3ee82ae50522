"""A release: what a replica lacks, frozen at one point of a history."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.wire.row_messages import chunk_rows, chunked, release_chunk, rows_in_chunk

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


@dataclass(frozen=True)
class Chunk:
    """Some rows of the table in `slot`, which are sent together.

    Attributes:
        slot: of the table.
        rows: the rows, as views of the message.
        message: what is sent to every replica.
    """

    slot: int
    rows: RowBatch
    message: bytes

    @classmethod
    def of(cls, slot: int, rows: RowBatch) -> "Chunk":
        """A chunk of some rows, which are copied into its message."""
        message = release_chunk(slot, rows)
        return cls(slot, rows_in_chunk(message, rows), message)

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
    chunks: list[Chunk] = field(default_factory=list)
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


def copied(slot: int, table: StampedTable, ids: Ids, told_after: int) -> Iterator[Chunk]:
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
        yield Chunk.of(slot, table.read(some, np.empty((len(some), spec.dim), spec.dtype)))
    told = gone[table.numbers(gone) > told_after]
    yield from (Chunk.of(slot, piece) for piece in chunked(RowBatch.deletes(Shard.whole(spec), told)))


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
