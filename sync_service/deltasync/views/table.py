"""A table of a view: the rows that replicas hold, and which of them are dirty."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltasync.base.threads import MODEL_THREAD, confined, in_shares
from deltasync.core.changes import ChangeCounts, Stamps
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, Mask, RowBatch, Values, members
from deltasync.core.stamped_table import Slots, StampedTable
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.table_memory import RAM, TableMemory
from deltasync.core.tables import Shard
from deltasync.core.value_types import distances
from deltasync.kernels import dirty_rows

Floats = NDArray[np.float64]
Versions = NDArray[np.int64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """The result of comparing rows with those that replicas hold: columns [n] as of a `DirtySet`, sorted by id.

    `slots` are positions in the table's arrays; `dirty` rows have another value than replicas hold.
    """

    ids: Ids
    slots: Slots
    norms: Floats
    flags: Flags
    dirty: Mask

    @classmethod
    def joined(cls, parts: "Sequence[ComparedRows]") -> "ComparedRows":
        """Join several results with ascending rows."""
        columns = zip(*((each.ids, each.slots, each.norms, each.flags, each.dirty) for each in parts), strict=True)
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, columns))


@dataclass(frozen=True, eq=False)
class DirtySet:
    """The dirty rows of a table: columns [n], sorted by id. Immutable.

    Attributes:
        norms: L2 norms of the deltas, the model's row minus the replicas' row; never NaN.
        since: the version since which each row is dirty.
        flags: `NEVER_SENT` and `DELETED` of `kernels.dirty_rows`.
    """

    ids: Ids
    norms: Floats
    since: Versions
    flags: Flags

    def __len__(self) -> int:
        """Number of dirty rows."""
        return len(self.ids)

    @property
    def never_sent(self) -> Mask:
        """[n] whether no replica ever got the row."""
        mask: Mask = (self.flags & dirty_rows.NEVER_SENT) != 0
        return mask

    @property
    def deleted(self) -> Mask:
        """[n] whether the row is deleted."""
        mask: Mask = (self.flags & dirty_rows.DELETED) != 0
        return mask

    def after(
        self, found: ComparedRows, version: int, held_stamps: Stamps, clean: ChangeCounts
    ) -> "tuple[DirtySet, ChangeCounts]":
        """The set after a comparison at `version`, and the counts of stamps of clean rows, which were `clean`."""
        to = _room(len(self) + len(found.ids))
        marked, cleaned = np.empty((2, len(found.ids)), np.int64)
        rows, came, left = dirty_rows.merge(
            *self._columns,
            found.ids,
            found.slots,
            found.norms,
            found.flags,
            found.dirty,
            version,
            held_stamps,
            *to._columns,
            marked,
            cleaned,
        )
        return to._first(rows), clean.without(marked[:came]).plus(cleaned[:left])

    def dated_as(self, before: "DirtySet", version: int) -> "DirtySet":
        """The same rows with the dates of `before`, or `version` for rows that are not in `before`."""
        since = np.full(len(self), version)
        since[members(self.ids, before.ids)] = before.since[members(before.ids, self.ids)]
        return DirtySet(self.ids, self.norms, since, self.flags)

    def without(self, ids: Ids) -> "DirtySet":
        """The set without these dirty rows ([m], strictly ascending)."""
        if len(ids) in (0, len(self)):
            return NONE_DIRTY if len(ids) else self
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


# Rows are encoded in pieces whose scratch memory fits the processor's cache.
_PIECE_BYTES = 1 << 20
_LARGEST_NORM = np.finfo(np.float32).max


class EncodedTable(StampedTable):
    """Rows encoded in a value type, stamped with the release that sent them; digests as replicas make them."""

    def __init__(self, form: TableForm, memory: TableMemory) -> None:
        super().__init__(form.encoded_spec, memory, normed=False)
        self.held_as_stored = form.held_as_encoded
        self._form = form

    def held_digests(self, rows: Values) -> RowDigests:
        """See `StampedTable.held_digests`."""
        return self._form.held_digests(rows)


@confined(dirty=MODEL_THREAD)
class ViewTable:
    """One table of a view, with the slots of its source. Only `form`, `lacking`, `grown` are for other threads.

    A row is dirty while replicas at the newest release hold another value than the model's row as sent.

    Attributes:
        source: the model's table.
        form: the form in which replicas get it. Replaced when the table grows.
        born: number of the release that created the table.
        stamp: the stamp of its rows at that time; 0 = as in the source.
        held: the rows that replicas at the newest release hold, in the value type.
        sent: the rows that replicas receive: `held`, or the norms.
        dirty: the rows that were dirty at the last comparison.
    """

    def __init__(
        self, source: StampedTable, form: TableForm, memory: TableMemory = RAM, born: int = 0, stamp: int = 0
    ) -> None:
        self.source, self.form, self.born, self.stamp = source, form, born, stamp
        self.held = EncodedTable(form, memory)
        self.sent: StampedTable = self.held
        if form.mode is Mode.IDS:
            self.sent = StampedTable(form.wire_spec, memory, normed=False)
        self.dirty = NONE_DIRTY
        # Counts of the clean rows, and the version up to which the source was compared. They are one tuple, so any
        # thread reads both as of the same moment.
        self._counted = self.held.counts, 0

    @property
    def name(self) -> str:
        """The table's name."""
        return self.form.spec.name

    @property
    def stamped(self) -> list[StampedTable]:
        """`held`, and `sent` if that is a separate table."""
        return [self.held] if self.sent is self.held else [self.held, self.sent]

    @property
    def compared(self) -> int:
        """The version up to which rows of the source were compared."""
        return self._counted[1]

    def becomes(self, form: TableForm) -> bool:
        """Whether the table already has this form, except that it may have fewer rows."""
        rows = self.form.spec.rows
        return rows <= form.spec.rows and self.form == replace(form, spec=replace(form.spec, rows=rows))

    def within(self, ids: Ids) -> Ids:
        """Those of `ids` ([n], ascending), rows of the source, for which the table has room."""
        return ids[: np.searchsorted(self.source.locate(ids), self.held.slots)]

    def lacking(self, number: int) -> int:
        """Upper bound of the rows that a replica at `number` lacks: dirty rows, rows sent after `number`, and rows
        changed since the last comparison, which may count twice. Any thread may call it.
        """
        clean, compared = self._counted  # Read before the source's counts, which may only be newer.
        rows, changed = self.source.slots, self.source.counts.after(compared)
        return min(rows, rows - clean.rows + clean.after(number) + changed)

    def lacking_of_kept(self, number: int) -> int:
        """The rows that a replica at `number` lacks of the kept version in the table. Any thread may call it."""
        clean, _ = self._counted
        return self.held.slots - clean.rows + clean.after(number)

    # New tables, and tables that grow.

    def copy(self, ids: Ids) -> None:
        """Copy rows ([n], ascending) of the source into a new table, also deleted ones, with the table's stamp."""
        ids = self.within(ids)
        self.update(ids, None, self.stamp or 1)
        if not self.stamp:
            self.held.restamp(ids, self.source.stamps[self.source.locate(ids)])

    def grown(self, form: TableForm) -> Callable[[], None]:
        """Allocate room for more rows. Return a function for the model's thread that enlarges the table."""
        specs = [form.encoded_spec, *([] if self.sent is self.held else [form.wire_spec])]
        steps = [table.grown(spec) for table, spec in zip(self.stamped, specs, strict=True)]

        def grow() -> None:
            before, (clean, compared) = self.held.slots, self._counted
            for step in steps:
                step()
            self.form = form
            # Rows beyond the old size may have changed before the last comparison, which left them out.
            new = self.source.ids_of(self.source.index.changed_in(before, self.held.slots, 0))
            uncompared = len(new) > 0 and self.source.numbers(new).min() <= compared
            more = clean.plus_unchanged(self.held.slots - before)
            self._counted = more, 0 if uncompared else compared

        return grow

    # Which rows are dirty.

    def compare(self, ids: Ids) -> ComparedRows:
        """Compare rows of the source ([n], ascending) with those that replicas hold."""
        slots = self.source.locate(ids)
        norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
        flags, dirty = np.empty(len(ids), np.uint8), np.empty(len(ids), np.bool_)
        rows, held = self.source.rows, self.held.rows

        def compare(some: slice) -> None:
            norms[some], differs[some] = self.form.compare(rows, held, slots[some])

        in_shares(compare, len(ids))
        dirty_rows.judge(slots, differs, self.source.stamps, self.held.stamps, dirty, flags)
        return ComparedRows(ids, slots, norms, flags, dirty)

    def note_compared(self, dirty: DirtySet, clean: ChangeCounts, version: int) -> None:
        """Set the dirty rows after comparing all rows changed up to a version."""
        self.dirty = dirty
        self._counted = clean, version

    def note_clean(self, version: int) -> None:
        """Note that no row was dirty at a version; at version 0, that no row has been compared."""
        self.note_compared(NONE_DIRTY, self.held.counts, version)

    @property
    def clean(self) -> ChangeCounts:
        """Counts of the stamps of clean rows."""
        return self._counted[0]

    def restore(self, ids: Ids, since: Versions, compared: int) -> None:
        """Restore the dirty rows of a checkpoint, once all rows are loaded. The next comparison corrects norms."""
        comparison = self.compare(ids)
        self.dirty = DirtySet(ids, comparison.norms, since, comparison.flags)
        self._counted = self.held.counts.without(self.held.stamps[self.held.locate(ids)]), compared

    # Making a release.

    def note_updated(self, ids: Ids, number: int) -> None:
        """Note that replicas at release `number` hold these rows ([n], ascending), which are clean now."""
        clean, compared = self._counted
        self._counted = clean.plus_rows(len(ids), number), compared
        self.dirty = self.dirty.without(ids)

    def update(self, ids: Ids, norms: Floats | None, number: int) -> list[RowBatch]:
        """Update rows ([n], ascending) to their present values, which replicas at release `number` will hold.

        `norms` [n] are their distances from the rows that replicas held; None = replicas held none. Returns the
        rows as sent. After `DamagedRows`, some of the others are already updated.
        """
        gone = self.source.deleted(ids)
        live, deleted = (ids, ids[:0]) if not gone.any() else (ids[~gone], ids[gone])
        norms = norms if norms is None or not gone.any() else norms[~gone]
        sent, size = list[RowBatch](), max(1, _PIECE_BYTES // self.source.spec.row_bytes)
        for some in (slice(start, start + size) for start in range(0, len(live), size)):
            rows = self._encoded(live[some])
            self.held.apply(rows, number)
            if self.sent is not self.held:
                far = self._norms(live[some]) if norms is None else norms[some]
                values = np.minimum(far, _LARGEST_NORM).astype(np.float32)[:, None]
                rows = RowBatch.of_table(self.sent.spec, rows.ids, values)
                self.sent.apply(rows, number)
            # The digests are of rows as replicas hold them, which may differ from the rows as sent.
            sent.append(replace(rows, digests=None))
        if len(deleted):
            for table in self.stamped:
                rows = RowBatch.deletes(Shard.whole(table.spec), deleted)
                table.apply(rows, number)
            sent.append(rows)
        return sent

    def _encoded(self, ids: Ids) -> RowBatch:
        """Rows of the source, encoded for replicas."""
        room = np.empty((len(ids), self.source.spec.dim), self.source.spec.dtype)
        rows, shard = self.source.read(ids, room), Shard.whole(self.held.spec)
        if self.form.bitwise:
            return replace(rows, shard=shard)
        return RowBatch(shard, ids, self.form.encode(rows.values))

    def _norms(self, ids: Ids) -> Floats:
        """Norms of rows of the source; 0 for rows that are not trained."""
        if not self.source.spec.kind.trained:
            return np.zeros(len(ids))
        return distances(self.source.rows_of(ids), np.zeros(1, self.source.spec.dtype))


class ReplicaComparison:
    """Compares rows with those of replicas in blocks, while the source changes; a row's last result counts."""

    def __init__(self, table: ViewTable, version: int) -> None:
        """Rows that were clean before will be dirty since `version`."""
        self._table, self._version = table, version
        self._dirty, self._clean = table.dirty, table.clean
        self._unmerged = list[ComparedRows]()  # With ascending rows.

    def add(self, ids: Ids) -> None:
        """Compare rows of the source ([n], ascending)."""
        ids = self._table.within(ids)
        if self._unmerged and len(ids) and ids[0] <= self._unmerged[-1].ids[-1]:
            self._merge()
        if len(ids):
            self._unmerged.append(self._table.compare(ids))

    def finish(self, version: int) -> None:
        """Put the result into the table, after comparing all changes up to `version`."""
        several = self._dirty is not self._table.dirty
        self._merge()
        # A row that was clean only during the comparison keeps its earlier date, as if all rows had been compared
        # at once.
        dirty = self._dirty.dated_as(self._table.dirty, self._version) if several else self._dirty
        if self._version > version:  # No version arrived; the table only grew.
            dirty = replace(dirty, since=np.minimum(dirty.since, version))
        self._table.note_compared(dirty, self._clean, version)

    def _merge(self) -> None:
        if self._unmerged:
            rows = ComparedRows.joined(self._unmerged)
            self._unmerged = []
            held = self._table.held.stamps
            self._dirty, self._clean = self._dirty.after(rows, self._version, held, self._clean)


class RowUpdate:
    """Updates dirty rows to their values at one version, in pieces; a row is updated before a cut changes it."""

    def __init__(
        self, table: ViewTable, ids: Ids, norms: Floats, number: int, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        self._piece_rows = max(1, piece_bytes // table.source.spec.row_bytes)
        self._table, self._ids, self._norms, self._number = table, ids, norms, number
        self._left = np.ones(len(ids), np.bool_)
        self._at = 0
        self.sent: list[RowBatch] | None = None
        self._error: Exception | None = None

    def begin(self, *, collect: bool = False) -> None:
        """Fix the present values; from now on, `collect` the updated rows as sent."""
        self.sent = [] if collect else None
        self._table.source.before_change.append(self._before_change)
        for each in self._table.stamped:
            each.unfinished = self._number

    def go_on(self) -> bool:
        """Update some more rows, and return whether all are done. Raises the errors of `ViewTable.update`."""
        if self._error:
            raise self._error
        some = slice(self._at, self._at + self._piece_rows)
        self._update(self._at + np.flatnonzero(self._left[some]))
        self._at = some.stop
        if self._at < len(self._ids):
            return False
        self._table.source.before_change.remove(self._before_change)
        for each in self._table.stamped:
            each.unfinished = 0
        self._table.note_updated(self._ids, self._number)
        return True

    def _update(self, which: Ids) -> None:
        rows = self._table.update(self._ids[which], self._norms[which], self._number)
        if self.sent is not None:
            self.sent += rows
        self._left[which] = False

    def _before_change(self, ids: Ids) -> None:
        at = np.searchsorted(self._ids, ids)
        at = at[at < len(self._ids)]
        which = at[self._left[at] & (self._ids[at] == ids[: len(at)])]
        try:
            if len(which):
                self._update(which)
        except Exception as error:  # noqa: BLE001  # The next `go_on` raises it; the cut must not fail.
            self._error = error
