"""A table of a view: the rows that replicas hold, and which of them are dirty."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltasync.base.threads import MODEL_THREAD, confined, in_shares
from deltasync.core.changes import ChangeCounts, Stamps
from deltasync.core.delivery import Delivery, Mode
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, Mask, RowBatch, Values, members
from deltasync.core.stamped_table import Slots, StampedTable
from deltasync.core.table_memory import RAM, TableMemory
from deltasync.core.tables import Shard
from deltasync.core.value_types import distances
from deltasync.kernels import dirty_rows

Floats = NDArray[np.float64]
Versions = NDArray[np.int64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """Some rows, compared with what replicas hold of them: columns [n], sorted by id.

    Attributes:
        ids: int64, strictly ascending.
        slots: int64, where the rows are in the arrays of the table.
        norms: float64, L2 norms of the deltas.
        flags: uint8, `NEVER_SENT` and `DELETED` of `kernels.dirty_rows`.
        dirty: whether replicas hold something else than the row.
    """

    ids: Ids
    slots: Slots
    norms: Floats
    flags: Flags
    dirty: Mask

    @classmethod
    def joined(cls, parts: "Sequence[ComparedRows]") -> "ComparedRows":
        """Several of them, of ascending rows, as one."""
        columns = zip(*((each.ids, each.slots, each.norms, each.flags, each.dirty) for each in parts), strict=True)
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, columns))


@dataclass(frozen=True, eq=False)
class DirtySet:
    """The dirty rows of a table: columns [n], sorted by id. It never changes; each change makes another.

    Attributes:
        ids: int64, strictly ascending.
        norms: float64, L2 norms of the deltas: the model's row less the row that replicas hold; never NaN.
        since: int64, the version since which each is dirty.
        flags: uint8, `NEVER_SENT` and `DELETED` of `kernels.dirty_rows`.
    """

    ids: Ids
    norms: Floats
    since: Versions
    flags: Flags

    def __len__(self) -> int:
        """How many rows are dirty."""
        return len(self.ids)

    @property
    def never_sent(self) -> Mask:
        """Which of them no replica was ever sent."""
        mask: Mask = (self.flags & dirty_rows.NEVER_SENT) != 0
        return mask

    @property
    def deleted(self) -> Mask:
        """Which of them are deleted."""
        mask: Mask = (self.flags & dirty_rows.DELETED) != 0
        return mask

    def after(
        self, compared_rows: ComparedRows, version: int, held_stamps: Stamps, clean: ChangeCounts
    ) -> "tuple[DirtySet, ChangeCounts]":
        """The set once some rows were compared, and the counts of the stamps of rows that are not dirty.

        Args:
            compared_rows: the rows. Those that were not dirty before are dirty since `version`.
            version: see there.
            held_stamps: [N], when replicas were last sent each row of the table, by slot.
            clean: counts of the stamps of all rows that were not dirty before.
        """
        to = _room(len(self) + len(compared_rows.ids))
        marked, cleaned = np.empty((2, len(compared_rows.ids)), np.int64)
        rows, came, left = dirty_rows.merge(
            *self._columns,
            compared_rows.ids,
            compared_rows.slots,
            compared_rows.norms,
            compared_rows.flags,
            compared_rows.dirty,
            version,
            held_stamps,
            *to._columns,
            marked,
            cleaned,
        )
        return to._first(rows), clean.without(marked[:came]).plus(cleaned[:left])

    def dated_as(self, before: "DirtySet", version: int) -> "DirtySet":
        """The same rows: dirty since when `before` says, or since `version` where they are not among those."""
        since = np.full(len(self), version)
        since[members(self.ids, before.ids)] = before.since[members(before.ids, self.ids)]
        return DirtySet(self.ids, self.norms, since, self.flags)

    def without(self, ids: Ids) -> "DirtySet":
        """The set without these rows ([m], strictly ascending), as far as they are in it."""
        if not len(ids):
            return self
        to = _room(len(self))
        return to._first(dirty_rows.remove(*self._columns, ids, *to._columns))

    def _first(self, rows: int) -> "DirtySet":
        return DirtySet(self.ids[:rows], self.norms[:rows], self.since[:rows], self.flags[:rows])

    @property
    def _columns(self) -> tuple[Ids, Floats, Versions, Flags]:
        return self.ids, self.norms, self.since, self.flags


def _room(rows: int) -> DirtySet:
    return DirtySet(np.empty(rows, np.int64), np.empty(rows), np.empty(rows, np.int64), np.empty(rows, np.uint8))


NONE_DIRTY = _room(0)


# Rows are encoded in pieces whose scratch memory stays in the processor's cache.
_PIECE_BYTES = 1 << 20
_LARGEST_NORM = np.finfo(np.float32).max


class EncodedTable(StampedTable):
    """Rows encoded in a value type, stamped with the release that has them.

    Its digests are of the rows as replicas hold them: decoded, or as they are sent.
    """

    def __init__(self, delivery: Delivery, memory: TableMemory) -> None:
        super().__init__(delivery.encoded_spec, memory, normed=False)
        self.held_as_stored = delivery.held_as_encoded
        self._delivery = delivery

    def held_digests(self, rows: Values) -> RowDigests:
        """See `StampedTable.held_digests`."""
        return self._delivery.held_digests(rows)


@confined(dirty=MODEL_THREAD)
class ViewTable:
    """One table of a view. Used on the model's thread only, except for `delivery`, `lacking` and `grown`.

    Its arrays have each row in the same slot as the source.

    A row is dirty while replicas at the newest release hold something else than the model's row, as it is sent.

    Attributes:
        source: the model's table.
        delivery: what replicas are sent of it. Replaced when the table grows.
        born: number of the release that made the table.
        stamp: what its rows were stamped with then; 0 = as in the source.
        held: what replicas at the newest release hold, in the value type.
        sent: what replicas are sent: `held`, or the norms.
        dirty: the rows that were dirty when rows were last compared.
    """

    def __init__(
        self, source: StampedTable, delivery: Delivery, memory: TableMemory = RAM, born: int = 0, stamp: int = 0
    ) -> None:
        """A table that replicas hold nothing of.

        Raises:
            StorageFailed: there is no room.
        """
        self.source = source
        self.delivery = delivery
        self.born = born
        self.stamp = stamp
        self.held = EncodedTable(delivery, memory)
        self.sent: StampedTable = self.held
        if delivery.mode is Mode.IDS:
            self.sent = StampedTable(delivery.wire_spec, memory, normed=False)
        self.dirty = NONE_DIRTY
        # Counts of the rows that are not dirty, and the version after which rows of the source were not compared.
        # Replaced together, so that any thread reads what belongs together.
        self._counted = self.held.counts, 0

    @property
    def name(self) -> str:
        """The table's name."""
        return self.delivery.spec.name

    @property
    def stamped(self) -> list[StampedTable]:
        """What is held, and what is sent where that is something else."""
        return [self.held] if self.sent is self.held else [self.held, self.sent]

    @property
    def compared(self) -> int:
        """The version after which rows of the source have changed that were not compared yet."""
        return self._counted[1]

    def becomes(self, delivery: Delivery) -> bool:
        """Whether the table is as `delivery` wants it, except that it may have fewer rows."""
        rows = self.delivery.spec.rows
        return rows <= delivery.spec.rows and self.delivery == replace(
            delivery, spec=replace(delivery.spec, rows=rows)
        )

    def within(self, ids: Ids) -> Ids:
        """Those of some ids of the source ([n], ascending) that the table has room for."""
        return ids[: np.searchsorted(self.source.locate(ids), self.held.slots)]

    def lacking(self, number: int) -> int:
        """How many rows a replica at `number` does not hold as the source has them, at most. Any thread.

        These are the dirty rows, others that were sent after `number`, and those that have changed since they were
        last compared. Which of the latter are dirty or were sent before is not known: these are counted twice.
        """
        clean, compared = self._counted  # Before the source's counts, which may only be newer.
        rows, changed = self.source.slots, self.source.counts.after(compared)
        return min(rows, rows - clean.rows + clean.after(number) + changed)

    # A new table, and one that grows.

    def copy(self, ids: Ids) -> None:
        """Make rows ([n], ascending) of a new table what the source has now, with the table's stamp.

        Deleted rows too: a replica may hold them, in another form.

        Raises:
            DamagedRows: rows of the source do not fit their digests.
        """
        ids = self.within(ids)
        self._write(ids, None, self.stamp or 1)
        if not self.stamp:
            self.held.restamp(ids, self.source.stamps[self.source.locate(ids)])

    def copied(self, version: int) -> None:
        """Note that all rows were copied, as they are at a version."""
        self._counted = self.held.counts, version

    def grown(self, delivery: Delivery) -> Callable[[], None]:
        """Take the room for more rows. Blocks; any thread.

        Returns:
            A function that makes the table as large as `delivery` says: for the model's thread.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        specs = [delivery.encoded_spec, *([] if self.sent is self.held else [delivery.wire_spec])]
        steps = [table.grown(spec) for table, spec in zip(self.stamped, specs, strict=True)]

        def grow() -> None:
            before, (clean, compared) = self.held.slots, self._counted
            for step in steps:
                step()
            self.delivery = delivery
            # Rows that there was no room for may have changed before rows were last compared, and were not.
            new = self.source.ids_of(self.source.changed_in(before, self.held.slots, 0))
            uncompared = len(new) > 0 and self.source.numbers(new).min() <= compared
            more = clean.plus_unchanged(self.held.slots - before)
            self._counted = more, 0 if uncompared else compared

        return grow

    # Which rows are dirty.

    def compare(self, ids: Ids) -> ComparedRows:
        """Compare rows of the source ([n], ascending) with what replicas hold."""
        slots = self.source.locate(ids)
        norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
        flags, dirty = np.empty(len(ids), np.uint8), np.empty(len(ids), np.bool_)
        rows, held = self.source.rows, self.held.rows

        def compare(some: slice) -> None:
            norms[some], differs[some] = self.delivery.compare(rows, held, slots[some])

        in_shares(compare, len(ids))
        dirty_rows.judge(slots, differs, self.source.stamps, self.held.stamps, dirty, flags)
        return ComparedRows(ids, slots, norms, flags, dirty)

    def note_compared(self, dirty: DirtySet, clean: ChangeCounts, version: int) -> None:
        """Note the dirty rows, once all rows that have changed up to a version were compared."""
        self.dirty = dirty
        self._counted = clean, version

    @property
    def clean(self) -> ChangeCounts:
        """Counts of the stamps of rows that are not dirty."""
        return self._counted[0]

    def restore(self, ids: Ids, since: Versions, compared: int) -> None:
        """Go on with dirty rows that a checkpoint has, once all rows are loaded.

        How far each row is from what is held is found anew. It is right for rows that have not changed since they
        were compared; the next comparison has the others.
        """
        found = self.compare(ids)
        self.dirty = DirtySet(ids, found.norms, since, found.flags)
        self._counted = self.held.counts.without(self.held.stamps[self.held.locate(ids)]), compared

    # What a release does.

    def update(self, ids: Ids, norms: Floats, number: int) -> None:
        """Update what replicas at release `number` hold of dirty rows ([n], ascending) to what the source has now.

        Args:
            ids: the rows.
            norms: [n], how far they are from what replicas held.
            number: the release.

        Raises:
            DamagedRows: rows of the source do not fit their digests. Some of the others are updated already.
        """
        self._write(ids, norms, number)

    def note_updated(self, ids: Ids, number: int) -> None:
        """Note that replicas at release `number` hold these dirty rows ([n], ascending)."""
        clean, compared = self._counted
        self._counted = clean.plus_rows(len(ids), number), compared
        self.dirty = self.dirty.without(ids)

    def forget_dirty(self, version: int) -> None:
        """Note that no row is dirty at a version."""
        self.note_compared(NONE_DIRTY, self.held.counts, version)

    def _write(self, ids: Ids, norms: Floats | None, number: int) -> None:
        """Encode rows of the source and stamp them. Without `norms`, replicas held nothing before."""
        gone = self.source.deleted(ids)
        live, deleted = (ids, ids[:0]) if not gone.any() else (ids[~gone], ids[gone])
        norms = norms if norms is None or not gone.any() else norms[~gone]
        for some in self._pieces(len(live)):
            rows = self._encoded(live[some])
            self.held.apply(rows, number)
            if self.sent is not self.held:
                far = self._norms(live[some]) if norms is None else norms[some]
                values = np.minimum(far, _LARGEST_NORM).astype(np.float32)[:, None]
                self.sent.apply(RowBatch.of_table(self.sent.spec, rows.ids, values), number)
        if len(deleted):
            for table in self.stamped:
                table.apply(RowBatch.deletes(Shard.whole(table.spec), deleted), number)

    def _pieces(self, rows: int) -> Iterator[slice]:
        size = max(1, _PIECE_BYTES // self.source.spec.row_bytes)
        return (slice(start, start + size) for start in range(0, rows, size))

    def _encoded(self, ids: Ids) -> RowBatch:
        """Rows of the source as replicas are to hold them."""
        room = np.empty((len(ids), self.source.spec.dim), self.source.spec.dtype)
        rows, shard = self.source.read(ids, room), Shard.whole(self.held.spec)
        if self.delivery.bitwise:
            return replace(rows, shard=shard)
        return RowBatch(shard, ids, self.delivery.encode(rows.values))

    def _norms(self, ids: Ids) -> Floats:
        """How far rows of the source are from nothing; 0 for what is not trained."""
        if not self.source.spec.kind.trained:
            return np.zeros(len(ids))
        return distances(self.source.rows_of(ids), np.zeros(1, self.source.spec.dtype))


class ReplicaComparison:
    """A comparison of a table's rows with what replicas hold, block by block, while the source changes.

    The table shows nothing of it before `finish`. A row that is compared again counts as it was found last.
    """

    def __init__(self, table: ViewTable, version: int) -> None:
        """Begin. Rows that were not dirty before will be dirty since `version`."""
        self._table = table
        self._version = version
        self._dirty = table.dirty
        self._clean = table.clean
        self._unmerged = list[ComparedRows]()  # Of ascending rows.

    def add(self, ids: Ids) -> None:
        """Compare rows of the source ([n], ascending)."""
        ids = self._table.within(ids)
        if self._unmerged and len(ids) and ids[0] <= self._unmerged[-1].ids[-1]:
            self._merge()
        if len(ids):
            self._unmerged.append(self._table.compare(ids))

    def finish(self, version: int) -> None:
        """Put the result into the table: all that has changed up to `version` was compared."""
        several = self._dirty is not self._table.dirty
        self._merge()
        # A row that was clean for a moment is dirty since when it was before the comparison, as if all rows
        # had been compared at once.
        dirty = self._dirty.dated_as(self._table.dirty, self._version) if several else self._dirty
        if self._version > version:  # Nothing has come since but room for more rows.
            dirty = replace(dirty, since=np.minimum(dirty.since, version))
        self._table.note_compared(dirty, self._clean, version)

    def _merge(self) -> None:
        if self._unmerged:
            rows = ComparedRows.joined(self._unmerged)
            self._unmerged = []
            held = self._table.held.stamps
            self._dirty, self._clean = self._dirty.after(rows, self._version, held, self._clean)


class RowUpdate:
    """Updates what replicas hold of dirty rows, piece by piece, while the source goes on.

    A row that is about to change is updated just before. The table's dirty rows stay what they were until the end.
    """

    def __init__(self, table: ViewTable, ids: Ids, norms: Floats, number: int) -> None:
        """Of a release: rows ([n], ascending), and how far each is from what replicas held [n]."""
        self._table = table
        self._ids = ids
        self._norms = norms
        self._number = number
        self._left = np.ones(len(ids), np.bool_)
        self._at = 0
        self._error: Exception | None = None

    def begin(self) -> None:
        """Update the rows to what they are now, whatever changes later."""
        self._table.source.before_change.append(self._before_change)

    def go_on(self) -> bool:
        """Update some more rows; whether these were the last.

        Raises:
            DamagedRows: rows of the source do not fit their digests. Some of the others are updated already.
        """
        if self._error:
            raise self._error
        some = slice(self._at, self._at + max(1, _PIECE_BYTES // self._table.source.spec.row_bytes))
        self._update(self._at + np.flatnonzero(self._left[some]))
        self._at = some.stop
        if self._at < len(self._ids):
            return False
        self._table.source.before_change.remove(self._before_change)
        self._table.note_updated(self._ids, self._number)
        return True

    def _update(self, which: Ids) -> None:
        self._table.update(self._ids[which], self._norms[which], self._number)
        self._left[which] = False

    def _before_change(self, ids: Ids) -> None:
        at = np.searchsorted(self._ids, ids)
        at = at[at < len(self._ids)]
        which = at[self._left[at] & (self._ids[at] == ids[: len(at)])]
        try:
            if len(which):
                self._update(which)
        except Exception as error:  # noqa: BLE001  # raised by the next `go_on`: the change is none of its business
            self._error = error
