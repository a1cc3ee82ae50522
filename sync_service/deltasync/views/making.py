"""Make one release: copy and compare rows in blocks, then the rest at one version of the model.

The release chooses its rows at that version, then updates them piece by piece, with the same result as if it did
everything at once. That is why the log needs only the row ids, and why a replay, which uses the same code, ends
with the same bits.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltasync.base.progress import Progress
from deltasync.checkpoints.manifest import TableKey
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import DamagedRows, Ids, Mask, members
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import TableKind
from deltasync.kernels.ranking import split_amounts
from deltasync.model.applied_tables import key_of
from deltasync.model.feed import Backlog, RowTotals, total
from deltasync.views.kept_tables import delete_later_rows
from deltasync.views.log import ViewState
from deltasync.views.picking import DirtyRows
from deltasync.views.table import ReplicaComparison, RowUpdate, ViewTable

# Cuts wait for at most this time and one block.
_TURN_SECONDS = 0.01
# Bytes in a block, and left for the last call. Copying takes longer than comparing, which uses several cores.
_COPIED_BYTES, _COMPARED_BYTES = 2 << 20, 64 << 20


@dataclass(frozen=True)
class ReleasePlan:
    """The tables of a view after a release.

    Attributes:
        tables: all tables, by slot.
        new: the tables that the release creates.
        growth: functions that enlarge existing tables, for the model's thread.
        kept: the tables of the kept version from which the release is made; empty = the model's.
    """

    tables: tuple[ViewTable, ...]
    new: tuple[ViewTable, ...] = ()
    growth: tuple[Callable[[], None], ...] = ()
    kept: Mapping[TableKey, StampedTable] = field(default_factory=dict)

    @classmethod
    def of(
        cls, there: Sequence[ViewTable], forms: Iterable[tuple[StampedTable, TableForm]], memory: TableMemory
    ) -> "ReleasePlan":
        """Plan the tables of a release from `forms`.

        It keeps the tables that have their form, enlarges those that only need more rows, and creates the others.
        Blocks; any thread may call it.

        Args:
            there: the tables of the view.
            forms: tables of the model, and the form in which replicas get each.
            memory: where to place new tables.

        Raises:
            StorageFailed: there is no room.
        """
        tables, new, growth = list[ViewTable](), list[ViewTable](), list[Callable[[], None]]()
        for source, form in forms:
            key = key_of(source)
            same = (table for table in there if key_of(table.source) == key and table.becomes(form))
            if table := next(same, None):
                growth += [table.grown(form)] if table.form != form else []
            else:
                table = ViewTable(source, form, memory)
                new.append(table)
            tables.append(table)
        return cls(tuple(tables), tuple(new), tuple(growth))


class Making:
    """An unfinished release. Used on the model's thread, by one call at a time.

    Attributes:
        tables: the tables of the view after it, by slot.
        new: the tables that it creates.
        stamp: the stamp of the rows in `new`; 0 = the stamps in the model's tables.
    """

    def __init__(self, before: ViewState, plan: ReleasePlan, stamp: int, consumer: str, version: int = 0) -> None:
        """Start with the tables of a plan, enlarging some.

        Args:
            before: the view's state.
            plan: the tables.
            stamp: see the attribute.
            consumer: the view's name, for progress messages.
            version: the kept version, if the release is made from one.
        """
        for grow in plan.growth:
            grow()
        self.tables = plan.tables
        self.new = plan.new
        self.stamp = stamp
        self._before = before
        if plan.kept:
            present = [table for table in self.tables if table not in self.new]
            delete_later_rows(plan.kept, present, version)
            for table in present:
                table.compare_with(plan.kept[key_of(table.source)])
        for table in self.new:
            table.stamp = stamp
        since = before.compared_version + 1
        self._comparisons = {
            table: ReplicaComparison(table, since) for table in self.tables if table not in self.new
        }
        after = [table.compared if table in self._comparisons else 0 for table in self.tables]
        self._block_bytes = _COPIED_BYTES if self.new else _COMPARED_BYTES
        self._copy = PreCopy([table.source for table in self.tables], after, self._block_bytes)
        self._copied = False
        self._updates = list[RowUpdate]()
        what = f"consumer {consumer!r}: reading rows of the model"
        self._progress = Progress(what, self._copy.left_bytes, "bytes")

    def let_go_kept(self, model: Iterable[StampedTable]) -> None:
        """Return to the model's tables after a release from a kept version, whether it was made or not."""
        live = {key_of(table): table for table in model}
        for table in self.tables:
            if source := live.get(key_of(table.source)):
                table.source = source
            else:
                table.source.removed = True  # The model has removed it meanwhile.

    def go_on(self) -> bool:
        """Copy or compare rows for a short time. Return whether only a little is left for `compare_rest`."""
        begun, blocks = time.perf_counter(), 0
        while not self._copied:
            block = self._copy.next_block(self._block_bytes)
            if block is None:
                self._copied = True
                return not blocks  # If this call did work, the rest gets a call of its own.
            slot, ids = block
            self._see(slot, ids)
            self._progress.add(len(ids) * self.tables[slot].source.spec.row_bytes)
            blocks += 1
            if time.perf_counter() >= begun + _TURN_SECONDS:
                return False
        return True

    def compare_rest(self, version: int) -> None:
        """Copy and compare all remaining rows, with the model's tables at `version`."""
        for slot, ids in self._copy.rest():
            self._see(slot, ids)
        for comparison in self._comparisons.values():
            comparison.finish(version)
        for table in self.new:
            table.copied(version)

    def dirty(self, overdue_version: int) -> list[DirtyRows]:
        """The dirty rows by slot, none of new tables; overdue if dirty since `overdue_version` or longer."""
        result = []
        for table in self.tables:
            dirty, ranked = table.dirty, table.source.spec.kind.ranked
            forced = dirty.deleted if ranked else np.ones(len(dirty), np.bool_)
            overdue, row_bytes = dirty.since <= overdue_version, table.sent.spec.row_bytes
            result.append(DirtyRows(dirty.ids, dirty.norms, dirty.never_sent, overdue, forced, row_bytes))
        self._force_handed_over(result)
        return result

    def begin_update(self, taken: Sequence[Mask], number: int) -> tuple[list[Ids], RowTotals, dict[str, Backlog]]:
        """Start updating the dirty rows in the masks `taken`, by slot, to their present values.

        Replicas at release `number` will hold these values; `go_on_updating` does the work.

        Returns:
            The dirty rows to update ([n], ascending) by slot, the totals of the release including all rows of new
            tables, and the backlog of each table by name.
        """
        every, amounts, backlog, updates = list[Ids](), list[RowTotals](), dict[str, Backlog](), list[RowUpdate]()
        for table, mask in zip(self.tables, taken, strict=True):
            amount, left, oldest = _split(table, mask)
            amounts.append(_whole(table) if table in self.new else amount)
            backlog[table.name] = Backlog(left, table.source.norm, oldest)
            which = np.flatnonzero(mask)  # A few times faster than indexing with the mask.
            every.append(table.dirty.ids[which])
            updates.append(RowUpdate(table, every[-1], table.dirty.norms[which], number))
        for each in updates:  # At the end, because an update that has begun must not fail.
            each.begin()
        self._updates = updates
        return every, total(amounts), backlog

    def go_on_updating(self) -> bool:
        """Update rows for a short time, and return whether all are done. Cuts may be applied between calls.

        Raises:
            DamagedRows: rows of the model do not match their digests, or could not be updated. The tables are
                then between two releases.
        """
        begun = time.perf_counter()
        while self._updates:
            try:
                if self._updates[-1].go_on():
                    self._updates.pop()
            except DamagedRows:
                raise
            except Exception as error:  # For example lack of memory: some rows are updated, others are not.
                table = self.tables[len(self._updates) - 1]
                raise DamagedRows(table.name, table.dirty.ids) from error
            if time.perf_counter() >= begun + _TURN_SECONDS:
                break
        return not self._updates

    def _see(self, slot: int, ids: Ids) -> None:
        table = self.tables[slot]
        if comparison := self._comparisons.get(table):
            comparison.add(ids)
        else:
            table.copy(ids)

    def _force_handed_over(self, dirty: Sequence[DirtyRows]) -> None:
        """Force rows whose raw id changed. Otherwise a replica would return the old id's row for the new id."""
        by_name = {table.name: rows for table, rows in zip(self.tables, dirty, strict=True)}
        for table, changed in zip(self.tables, dirty, strict=True):
            rows = by_name.get(table.source.spec.of)
            if table.source.spec.kind is TableKind.ID_MAP and rows:
                # A new map counts all changes since the other tables were compared.
                since = table.within(table.source.changed_since(self._before.compared_version))
                for ids in (changed.ids, since):
                    np.logical_or(rows.forced, members(rows.ids, ids), out=rows.forced)


def left_of(table: ViewTable) -> Backlog:
    """The backlog of a table if a release takes none of its rows."""
    _, left, oldest = _split(table, np.zeros(len(table.dirty), np.bool_))
    return Backlog(left, table.source.norm, oldest)


def _whole(table: ViewTable) -> RowTotals:
    """The totals of all rows of a table."""
    rows = table.sent.counts.changed
    return RowTotals(rows, rows * table.sent.spec.row_bytes, table.source.norm)


def _split(table: ViewTable, taken: Mask) -> tuple[RowTotals, RowTotals, int]:
    """Totals of taken and other dirty rows, and the version since which the oldest of the others is dirty."""
    size, every = table.sent.spec.row_bytes, len(taken)
    rows, of_taken, of_left, oldest = split_amounts(table.dirty.norms, table.dirty.since, taken)
    left = RowTotals(every - int(rows), (every - int(rows)) * size, math.sqrt(of_left))
    return RowTotals(int(rows), int(rows) * size, math.sqrt(of_taken)), left, int(oldest)
