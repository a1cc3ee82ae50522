"""What the replicas of a consumer hold of one table, and which of its rows are dirty."""

from dataclasses import replace

import numpy as np

from deltasync.core.change_counts import ChangeCounts
from deltasync.core.delivery import Delivery
from deltasync.core.digests import RowDigests
from deltasync.core.distances import distances
from deltasync.core.id_sets import difference, union
from deltasync.core.mode import Mode
from deltasync.core.rows import Ids, Norms, RowBatch, Values
from deltasync.core.shares import in_shares
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.core.threads import MODEL_THREAD, confined
from deltasync.kernels import dirty_rows
from deltasync.storage.mapped_table import MappedTable, TableLayout, file_of
from deltasync.storage.table_files import ArraySpec, TableFiles, flush
from deltasync.views.dirty_set import DirtySet, Findings, Floats

_MARK_TYPE = np.dtype(np.int64)
_NO_IDS = np.zeros(0, np.int64)


class EncodedTable(MappedTable):
    """Rows encoded in a value type, stamped with the release that has them.

    Its digests are of the rows as replicas hold them: decoded, or as they are sent.
    """

    role = "held"

    def __init__(self, delivery: Delivery, files: TableFiles) -> None:
        self._delivery = delivery
        super().__init__(_held_layout(delivery), files)

    def held_digests(self, rows: Values) -> RowDigests:
        """See `StampedTable.held_digests`."""
        return self._delivery.held_digests(rows)

    def read(self, ids: Ids, out: Values) -> RowBatch:
        """See `StampedTable.read`."""
        if self._delivery.held_as_encoded:
            return super().read(ids, out)
        np.take(self.rows, ids, axis=0, out=out, mode="clip")
        self.check(ids, out)
        return RowBatch.of_table(self.spec, ids, out)


class Look:
    """A comparison of rows of a table with what replicas hold, block by block. On the model's thread.

    Attributes:
        after: the version after which rows have changed that are looked at.
        version: the source's newest when it began. What has changed since then is for the next look.
        findings: what was found of the first `done` rows.
        done: how many rows were compared.
    """

    def __init__(self, table: "ViewTable", ids: Ids, after: int) -> None:
        self._table = table
        self.after = after
        self.version = table.source.counts.newest
        self.findings = Findings.to_come(ids)
        self.done = 0

    @property
    def rows(self) -> int:
        """How many rows it is about."""
        return len(self.findings.ids)

    def advance(self, rows: int) -> None:
        """Compare the next so many rows."""
        block = self.findings[self.done : self.done + rows]
        self._table.compare(block, self.after + 1)
        self.done += len(block.ids)


@confined(dirty=MODEL_THREAD)
class ViewTable:
    """One table of a view. Used on the model's thread only, but for `lacking`, `to_compare` and `flush`.

    A row is dirty while replicas at the newest release hold something else than the model's row, as it is sent.

    Attributes:
        source: the model's table.
        delivery: what replicas are sent of it.
        files: what it is mapped from, which is `view_arrays` of the delivery.
        held: what replicas at the newest release hold, in the value type.
        sent: what replicas are sent: `held`, or the norms.
        dirty: the rows that were dirty at the last look.
        damaged: those of them that go with the next release, since of what is held of them some bits are lost.
    """

    def __init__(self, source: StampedTable, delivery: Delivery, files: TableFiles) -> None:
        self.source = source
        self.delivery = delivery
        self.files = files
        held, sent = len(_held_layout(delivery).arrays()), len(files.arrays) - 1
        self.held = EncodedTable(delivery, files.part(0, held))
        self.sent: MappedTable = self.held
        if delivery.mode is Mode.IDS:
            self.sent = MappedTable(_wire_layout(delivery), files.part(held, sent))
        # [N] int64: the version since which a row is dirty, 0 = it is not. What a restart finds of `dirty`.
        self._marks = files.arrays[sent]
        self._marks_files = files.part(sent, sent + 1)
        self.dirty = DirtySet.of_marks(self._marks[:0])
        # Of the rows that are not dirty. Both replaced whole, so that `lacking` may read them in any thread.
        self._clean: ChangeCounts = self.sent.counts
        self._compared_version = 0  # The source's newest version at the last look, as far as it is known.
        self._seen = True  # Whether norms and flags of what is dirty are known.
        self.damaged = _NO_IDS
        self.find_marked()

    def follow(self, before: "ViewTable") -> int:
        """Take the place of a table that had room for fewer rows.

        Returns:
            The last version before any of the source's rows that it had no room for: these were not compared.
        """
        self.dirty, self.damaged, self._seen = before.dirty, before.damaged, before._seen
        # Damage that was found since the files were made is marked in those of before at most.
        self._mark(self.dirty.ids, self.dirty.since)
        self._clean = self.sent.counts.without(self.sent.numbers(self.dirty.ids))
        changed = self.changed_since(0)
        numbers = self.source.numbers(changed[changed >= before.delivery.spec.rows])
        return int(numbers.min()) - 1 if len(numbers) else self.source.counts.newest

    def changed_since(self, version: int) -> Ids:
        """Sorted unique ids ([n]) of the rows of the source stamped after a version, as far as there is room."""
        changed = self.source.changed_since(version)
        return changed[: np.searchsorted(changed, self.delivery.spec.rows)]

    def copy(self, ids: Ids, number: int | None) -> None:
        """Take over rows of the source as they are. Stamp them with `number`; None = as in the source.

        Deleted ones too: a replica may hold them of before, in another form.

        Raises:
            DamagedRows: some of the source do not fit their digests; nothing was taken over.
        """
        gone = self.source.deleted(ids)
        live = ids[~gone]
        room = np.empty((len(live), self.held.spec.dim), self.held.spec.dtype)
        self.write(self.drawn(self.batch(live, room, self._norms_of(live))), number or 1)
        self.write(self.deletes(ids[gone]), number or 1)
        if number is None:
            self.held.restamp(ids, self.source.stamps[ids])
        self._clean = self.sent.counts  # No row of a table that is being made is dirty.

    # Which rows are dirty.

    def to_compare(self, compared_version: int) -> int:
        """How many rows a look would be about, at most. Any thread."""
        changed = self.source.counts.after(max(self._compared_version, compared_version))
        return changed if self._seen else changed + self.delivery.spec.rows - self._clean.rows

    def begin(self, compared_version: int) -> Look:
        """Begin to look at what has changed since the last look, at `compared_version` or later."""
        after = max(self._compared_version, compared_version)
        changed = self.changed_since(after) if self.source.counts.newest > after else _NO_IDS
        return Look(
            self, changed if self._seen else self.dirty.after(Findings.unseen(changed), after + 1).ids, after
        )

    def finish(self, look: Look) -> None:
        """Note what a look has found, once it is through."""
        self.dirty = self.dirty.after(look.findings, look.after + 1)
        self._compared_version, self._seen = look.version, True

    def find_dirty(self, compared_version: int) -> DirtySet:
        """The dirty rows, after a look at what has changed since the last one, at `compared_version` or later."""
        look = self.begin(compared_version)
        if look.rows:
            look.advance(look.rows)
            self.finish(look)
        if len(self.damaged):  # A look knows nothing of digests.
            self._mark_damaged(self.damaged, look.after + 1)
        return self.dirty

    def look_again(self) -> None:
        """Have the next look compare all dirty rows: some of the source were not as they are."""
        self._seen = False

    def compare(self, found: Findings, version: int) -> None:
        """Compare rows with what replicas hold, fill in what is found, and mark those dirty since `version`."""
        ids, numbers, differs = found.ids, np.empty((2, len(found.ids)), np.int64), np.empty_like(found.dirty)
        rows, held = self.source.rows, self.held.rows

        def look(some: slice) -> None:
            found.norms[some], differs[some] = self.delivery.compare(rows, held, ids[some])

        in_shares(look, len(ids))
        stamps = self.source.stamps, self.held.stamps, self.sent.stamps
        marked, cleaned = dirty_rows.judge(ids, differs, *stamps, self._marks, found.dirty, found.flags, *numbers)
        # What needs memory comes before: a look that fails is begun again.
        clean = self._clean.without(numbers[0, :marked]).plus(numbers[1, :cleaned])
        dirty_rows.mark(self._marks, ids, found.dirty, version)
        self._marks_files.touch(ids, 1)
        self._clean = clean

    def find_lost(self, first: int, last: int, compared_version: int) -> Ids:
        """Those of the rows from `first` to before `last` that the last look, at `compared_version` or later, must
        have found dirty, and that are not marked: the disk has lost that. They are dirty from here on.
        """
        version = max(self._compared_version, compared_version)
        numbers = np.abs(self.source.stamps[first : min(last, self.delivery.spec.rows)])
        compared = (numbers > 0) & (numbers <= version)
        ids = first + np.flatnonzero(compared & (self._marks[first : first + len(numbers)] == 0))
        found = Findings.to_come(ids)
        self.compare(found, version)
        if found.dirty.any():
            self.dirty = self.dirty.after(found, version)
        lost = ids[found.dirty]
        # Of a damaged row nobody knows whether it differs.
        return difference(lost, union(self.source.damaged(lost), self.held.damaged(lost)))

    # What a release does.

    def deletes(self, ids: Ids) -> RowBatch:
        """Rows that are no more, as `write` takes them."""
        return RowBatch.deletes(Shard.whole(self.held.spec), ids)

    def drawn(self, room: RowBatch) -> RowBatch:
        """Rows of the source as replicas are to hold them, encoded into the values of `room`, and their digests.

        Raises:
            DamagedRows: some of the source do not fit their digests.
        """
        if self.delivery.bitwise:
            return replace(room, digests=self.source.read(room.ids, room.values).digests)
        values = np.empty((len(room), self.source.spec.dim), self.source.spec.dtype)
        room.values[:] = self.delivery.encode(self.source.read(room.ids, values).values)
        return replace(room, digests=self.delivery.held_digests(room.values))

    def batch(self, ids: Ids, encoded: Values, norms: Floats) -> RowBatch:
        """Encoded rows as `write` takes them; with the norms ([n]) of what has changed where those are sent."""
        return RowBatch.of_table(self.held.spec, ids, encoded, None if self.sent is self.held else _as_fp32(norms))

    def write(self, rows: RowBatch, number: int) -> None:
        """Note that replicas at release `number` hold these encoded rows; `settle` is to be told of them all."""
        was_clean = rows.ids[self._marks[rows.ids] == 0]
        clean = self._clean.without(self.sent.numbers(was_clean)).plus_rows(len(rows), number)
        self.held.apply(rows, number)
        if self.sent is not self.held:
            self.sent.apply(self.sent_rows(rows), number)
        self._mark(rows.ids, 0)
        self._clean = clean

    def sent_rows(self, rows: RowBatch) -> RowBatch:
        """What replicas are sent of these encoded rows: these, or the norms of what has changed."""
        if self.sent is self.held:
            return rows
        if rows.deleted:
            return RowBatch.deletes(Shard.whole(self.sent.spec), rows.ids)
        if rows.norms is None:
            raise ValueError(f"rows of table {self.held.spec.name!r} without the norms that replicas are sent")
        return RowBatch.of_table(self.sent.spec, rows.ids, rows.norms[:, None])

    def settle(self, ids: Ids) -> None:
        """Note that these rows ([n], strictly ascending) are not dirty now: they were written."""
        self.dirty = self.dirty.without(ids)
        if len(self.damaged):
            self.damaged = difference(self.damaged, ids)
            self._count_if_sound()

    def mend(self, ids: Ids, version: int) -> Ids:
        """Make the rows `ids` ([n], strictly ascending), which do not fit their digests, again as they were.

        Returns:
            Those of which nobody knows what they were, mostly since the source has others by now: they are dirty,
            since `version`, and go with the next release.
        """
        for mapped in self.mapped:
            mapped.mend(RowBatch.deletes(Shard.whole(mapped.spec), ids[mapped.deleted(ids)]))
        known = difference(ids[~self.held.deleted(ids)], self.source.damaged(ids))
        encoded = self.delivery.encode(self.source.rows_of(known))
        same = self.held.fits(known, encoded)
        self.held.mend(RowBatch.of_table(self.held.spec, known[same], encoded[same]))
        left = union(self.held.damaged(ids), self.sent.damaged(ids))
        self._mark_damaged(left, version)
        self._count_if_sound()
        return left

    def _count_if_sound(self) -> None:
        """Digests may have been damaged, and counted: count them once no such row is left."""
        for table in () if len(self.damaged) else self.mapped:
            table.count()

    def _mark_damaged(self, ids: Ids, version: int) -> None:
        clean = ids[self._marks[ids] == 0]
        self._clean = self._clean.without(self.sent.numbers(clean))
        self._mark(clean, version)
        # Not only those: a look that was under way has found some of the others clean before they were marked.
        new = difference(ids, self.dirty.ids)
        self.dirty = self.dirty.after(Findings.unseen(new), version)
        self.damaged = union(self.damaged, ids)

    def _mark(self, ids: Ids, version: int | Ids) -> None:
        self._marks[ids] = version
        self._marks_files.touch(ids, 1)

    def lacking(self, number: int, compared_version: int) -> int:
        """How many rows a replica at `number` does not hold as the source has them, at most. Any thread.

        They are the dirty rows, others that were sent after `number`, and those that have changed since the last
        comparison, at `compared_version` or later. Which of the latter are dirty or were sent before is not known:
        these are counted twice.
        """
        compared_version = max(self._compared_version, compared_version)  # First: the counts may only be newer.
        clean, changed = self._clean, self.source.counts.after(compared_version)
        rows = self.source.spec.rows
        return min(rows, rows - clean.rows + clean.after(number) + changed)

    @property
    def mapped(self) -> list[MappedTable]:
        """What is held, and what is sent where that is something else."""
        return [self.held] if self.sent is self.held else [self.held, self.sent]

    def flush(self) -> None:
        """Wait until everything written before the call is on disk. Blocks; any thread."""
        flush([self.files])

    def retag(self, number: int) -> None:
        """See `StampedTable.retag_all`; `number` is that of the newest release."""
        for mapped in self.mapped:
            mapped.retag_all(number)
        self._clean = self.sent.counts.without(self.sent.numbers(self.dirty.ids))

    def find_marked(self) -> None:
        """Find the dirty rows anew, those marked on disk: after a restart, and what the log had to be written."""
        self.dirty = DirtySet.of_marks(self._marks)
        self._clean = self.sent.counts.without(self.sent.numbers(self.dirty.ids))
        self._seen = not len(self.dirty)

    def check_marks(self, newest: int) -> None:
        """Take marks that cannot be, while `newest` is the model's version, for those of the first version."""
        wrong = self.dirty.ids[(self.dirty.since < 1) | (self.dirty.since > newest)]
        if len(wrong):
            self._mark(wrong, 1)
            self.find_marked()

    def _norms_of(self, ids: Ids) -> Floats:
        """How far rows of the source are from nothing, which is what a new replica has; 0 where nobody is told."""
        if self.sent is self.held or not self.source.spec.kind.trained:
            return np.zeros(len(ids))
        return distances(self.source.rows_of(ids), np.zeros(1, self.source.spec.dtype))


def view_arrays(delivery: Delivery) -> list[ArraySpec]:
    """The arrays of a table of a view."""
    layouts = [(_held_layout(delivery), "")]
    layouts += [(_wire_layout(delivery), "norms/")] if delivery.mode is Mode.IDS else []
    arrays = [each for layout, folder in layouts for each in layout.arrays(folder)]
    return [*arrays, ArraySpec(file_of(delivery.spec, "since"), _MARK_TYPE, (delivery.spec.rows,))]


def _held_layout(delivery: Delivery) -> TableLayout:
    return TableLayout.of(delivery.encoded_spec, normed=False)


def _wire_layout(delivery: Delivery) -> TableLayout:
    return TableLayout.of(delivery.wire_spec, normed=False)


def _as_fp32(norms: Floats) -> Norms:
    return np.minimum(norms, np.finfo(np.float32).max).astype(np.float32)
