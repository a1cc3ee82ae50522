"""A release: what a replica lacks, frozen at one point of a history."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary, ref

from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.feeds.scratch import room_for
from deltasync.wire.row_messages import chunked

# Of all releases together; beyond it they are kept in unlinked files, so that slow replicas cost no memory.
RELEASES_IN_MEMORY_BYTES = 64 << 20

NO_TABLES: frozenset[int] = frozenset()

_Lack = tuple[int, frozenset[int], int]


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


@dataclass
class FrozenRelease:
    """Sorted ids and current values of every row that some replica lacks.

    Attributes:
        head: what a replica holds once it has applied this; None when nothing is published yet.
        batches: the rows of each table that has such rows, by slot.
        deletes: of each table that has some, those that are no more.
        whole: slots of the tables of which this holds every row.
        checksums: of every table, by slot, as a replica at `head` holds it.
        memory_bytes: how much memory these take; 0 when they are in unlinked files.
    """

    head: Head | None
    batches: dict[int, RowBatch] = field(default_factory=dict)
    deletes: dict[int, RowBatch] = field(default_factory=dict)
    whole: frozenset[int] = NO_TABLES
    checksums: tuple[int, ...] = ()
    memory_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(map(len, (*self.batches.values(), *self.deletes.values())))

    def chunks(self) -> Iterator[tuple[int, RowBatch]]:
        """The rows in pieces of bounded size, each with its slot."""
        batches = (*self.batches.items(), *self.deletes.items())
        return ((slot, piece) for slot, rows in batches for piece in chunked(rows))


class Releases:
    """The releases of one set of tables. Replicas that lack the same rows share one while any of them uses it."""

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
        self._tasks: WeakValueDictionary[_Lack, asyncio.Task[FrozenRelease]] = WeakValueDictionary()

    def get(self, after: int, whole: frozenset[int], head: int) -> asyncio.Task[FrozenRelease]:
        """The rows stamped after `after`, and all of the tables in the slots `whole`, while the head is `head`."""
        lack = (after, whole, head)
        task = self._tasks.get(lack)
        if task is None or _failed(task):
            task = self._tasks[lack] = asyncio.create_task(self._get(after, whole))
        return task

    async def _get(self, after: int, whole: frozenset[int]) -> FrozenRelease:
        return await self._run(self._freeze, after, whole)

    def _freeze(self, after: int, whole: frozenset[int]) -> FrozenRelease:
        alive = [release for each in self._frozen if (release := each())]
        room = RELEASES_IN_MEMORY_BYTES - sum(release.memory_bytes for release in alive)
        tables, head = self._state()
        release = freeze(tables, after, head, self._scratch, room, whole)
        self._frozen = [ref(each) for each in (*alive, release)]
        return release


def _failed(task: asyncio.Task[FrozenRelease]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def freeze(
    tables: Sequence[StampedTable],
    after: int,
    head: Head | None,
    scratch: Path,
    memory_bytes: int,
    whole: frozenset[int] = NO_TABLES,
) -> FrozenRelease:
    """Copy every row stamped after `after`, and all of the tables in the slots `whole`. Not while any row changes.

    Who holds nothing of a table need not know what is deleted in it.

    A release of more than `memory_bytes` is kept in unlinked files in the folder `scratch`.
    """
    changed = [_split(table, 0 if slot in whole else after) for slot, table in enumerate(tables)]
    pairs = list(zip(tables, changed, strict=True))
    total = sum(len(ids) * table.spec.row_bytes + gone.nbytes for table, (ids, gone) in pairs)
    spill = total > memory_bytes
    checksums = tuple(table.checksum for table in tables)
    release = FrozenRelease(head, whole=whole, checksums=checksums, memory_bytes=0 if spill else total)
    for slot, (table, (ids, gone)) in enumerate(pairs):
        if len(ids):
            release.batches[slot] = _copied(table, ids, scratch if spill else None)
        if len(gone):
            release.deletes[slot] = _deletes(table, gone, scratch if spill else None)
    return release


def _split(table: StampedTable, after: int) -> tuple[Ids, Ids]:
    """The rows stamped after `after`: those that are there, and those that are no more."""
    ids = table.changed_since(after)
    deleted = table.deleted(ids)
    if not deleted.any():
        return ids, ids[:0]
    return ids[~deleted], ids[deleted & (after > 0)]


def _copied(table: StampedTable, ids: Ids, scratch: Path | None) -> RowBatch:
    """Some rows as they are now: in memory, or in unlinked files in the folder `scratch`."""
    spec, what = table.spec, f"a release of table {table.spec.name!r}"
    values = room_for((len(ids), spec.dim), spec.dtype, scratch, what)
    return replace(table.read(ids, values), ids=_room_of(ids, scratch, what))


def _deletes(table: StampedTable, ids: Ids, scratch: Path | None) -> RowBatch:
    """Rows that are no more: likewise."""
    ids = _room_of(ids, scratch, f"a release of table {table.spec.name!r}")
    return RowBatch.deletes(Shard.whole(table.spec), ids)


def _room_of(ids: Ids, scratch: Path | None, what: str) -> Ids:
    if scratch is None:
        return ids
    spilled = room_for(ids.shape, ids.dtype, scratch, what)
    spilled[:] = ids
    return spilled
