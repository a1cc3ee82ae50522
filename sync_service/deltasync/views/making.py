"""Making one release: copy and compare rows block by block, then the rest at one version of the model.

Rows are chosen at that version, and taken piece by piece. A release is as if all of it had been done at that
version. So the log has only which rows it took, and a replay gives the same bits. What is done here is done
in a replay, too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.base.progress import Progress
from deltasync.core.delivery import Delivery
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import DamagedRows, Ids, Mask, members
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import TableKind
from deltasync.kernels.ranking import split_amounts
from deltasync.model.feed import Backlog, RowTotals, total
from deltasync.views.picking import DirtyRows
from deltasync.views.state import ViewState
from deltasync.views.table import ReplicaComparison, RowUpdate, ViewTable

# Cuts wait for no more than this and one block.
_TURN_SECONDS = 0.01
# Rows of a block, and rows that are left for the last call: to copy them takes longer than to compare them, which
# several cores do.
_COPIED_BYTES, _COMPARED_BYTES = 2 << 20, 64 << 20


@dataclass(frozen=True)
class ReleasePlan:
    """The tables that a release leads to.

    Attributes:
        tables: all of them, by slot.
        new: those that it makes.
        growth: what makes others larger, on the model's thread.
    """

    tables: tuple[ViewTable, ...]
    new: tuple[ViewTable, ...] = ()
    growth: tuple[Callable[[], None], ...] = ()

    @classmethod
    def of(
        cls, there: Sequence[ViewTable], wanted: Iterable[tuple[StampedTable, Delivery]], memory: TableMemory
    ) -> "ReleasePlan":
        """Keep the tables that are as they are wanted, make larger those that only need more rows, make others.

        Args:
            there: the tables that there are.
            wanted: tables of the model, and what replicas are to be sent of them.
            memory: where new ones are to be. Blocks; any thread.

        Raises:
            StorageFailed: there is no room.
        """
        tables, new, growth = list[ViewTable](), list[ViewTable](), list[Callable[[], None]]()
        for source, delivery in wanted:
            same = (table for table in there if table.source is source and table.becomes(delivery))
            if table := next(same, None):
                growth += [table.grown(delivery)] if table.delivery != delivery else []
            else:
                table = ViewTable(source, delivery, memory)
                new.append(table)
            tables.append(table)
        return cls(tuple(tables), tuple(new), tuple(growth))


class Making:
    """A release on its way. Used on the model's thread, by one call at a time.

    Attributes:
        tables: those that it leads to, by slot.
        new: those of them that it makes.
        stamp: what their rows are stamped with; 0 = as in the model's tables.
    """

    def __init__(self, before: ViewState, plan: ReleasePlan, stamp: int, consumer: str) -> None:
        """Begin with the tables of a plan, some of which grow now; `consumer` is whose view it is."""
        for grow in plan.growth:
            grow()
        self.tables = plan.tables
        self.new = plan.new
        self.stamp = stamp
        self._before = before
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

    def go_on(self) -> bool:
        """Copy or compare for a while; whether that is done, apart from a little left for `compare_rest`."""
        begun, blocks = time.perf_counter(), 0
        while not self._copied:
            block = self._copy.next_block(self._block_bytes)
            if block is None:
                self._copied = True
                return not blocks  # Otherwise, what is left has a call of its own.
            slot, ids = block
            self._see(slot, ids)
            self._progress.add(len(ids) * self.tables[slot].source.spec.row_bytes)
            blocks += 1
            if time.perf_counter() >= begun + _TURN_SECONDS:
                return False
        return True

    def compare_rest(self, version: int) -> None:
        """Copy and compare all that is left, while the model's tables are at `version`."""
        for slot, ids in self._copy.rest():
            self._see(slot, ids)
        for comparison in self._comparisons.values():
            comparison.finish(version)
        for table in self.new:
            table.copied(version)

    def dirty(self, overdue_version: int) -> list[DirtyRows]:
        """The dirty rows by slot, none of new tables. Rows dirty since `overdue_version` or before are overdue."""
        found = []
        for table in self.tables:
            dirty, ranked = table.dirty, table.source.spec.kind.ranked
            forced = dirty.deleted if ranked else np.ones(len(dirty), np.bool_)
            overdue, row_bytes = dirty.since <= overdue_version, table.sent.spec.row_bytes
            found.append(DirtyRows(dirty.ids, dirty.norms, dirty.never_sent, overdue, forced, row_bytes))
        self._force_handed_over(found)
        return found

    def begin_update(self, taken: Sequence[Mask], number: int) -> tuple[list[Ids], RowTotals, dict[str, Backlog]]:
        """Begin to update the `taken` dirty rows, by slot, to what they are now, and all rows of new tables.

        Replicas at release `number` are to hold them. `go_on_updating` does the work.

        Returns:
            The dirty rows ([n], ascending) that it updates, by slot; how much it updates, new tables included; and
            what it leaves of each table, by name.
        """
        every, amounts, backlog, updates = list[Ids](), list[RowTotals](), dict[str, Backlog](), list[RowUpdate]()
        for table, mask in zip(self.tables, taken, strict=True):
            amount, left, oldest = _split(table, mask)
            amounts.append(_whole(table) if table in self.new else amount)
            backlog[table.name] = Backlog(left, table.source.norm, oldest)
            which = np.flatnonzero(mask)  # A few times as fast as by a mask.
            every.append(table.dirty.ids[which])
            updates.append(RowUpdate(table, every[-1], table.dirty.norms[which], number))
        for each in updates:  # Last: what has begun must not fail.
            each.begin()
        self._updates = updates
        return every, total(amounts), backlog

    def go_on_updating(self) -> bool:
        """Update rows for a while; whether all are updated. Cuts may be applied meanwhile.

        Raises:
            DamagedRows: rows of the model do not fit their digests, or could not be updated. The tables are at no
                release now.
        """
        begun = time.perf_counter()
        while self._updates:
            try:
                if self._updates[-1].go_on():
                    self._updates.pop()
            except DamagedRows:
                raise
            except Exception as error:  # Say, no memory: some rows are of this release, and others are not.
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
        """Force rows whose raw id has changed: else a replica would look the new id up in the old one's row."""
        by_name = {table.name: rows for table, rows in zip(self.tables, dirty, strict=True)}
        for table, changed in zip(self.tables, dirty, strict=True):
            rows = by_name.get(table.source.spec.of)
            if table.source.spec.kind is TableKind.ID_MAP and rows:
                # A map that is new brings all that has changed since the others were compared.
                since = table.within(table.source.changed_since(self._before.compared_version))
                for ids in (changed.ids, since):
                    np.logical_or(rows.forced, members(rows.ids, ids), out=rows.forced)


def left_of(table: ViewTable) -> Backlog:
    """The dirty rows of a table."""
    _, left, oldest = _split(table, np.zeros(len(table.dirty), np.bool_))
    return Backlog(left, table.source.norm, oldest)


def _whole(table: ViewTable) -> RowTotals:
    """All rows of a table."""
    rows = table.sent.counts.changed
    return RowTotals(rows, rows * table.sent.spec.row_bytes, table.source.norm)


def _split(table: ViewTable, taken: Mask) -> tuple[RowTotals, RowTotals, int]:
    """Some of a table's dirty rows, the others, and the version since which the oldest of these is dirty."""
    size, every = table.sent.spec.row_bytes, len(taken)
    rows, of_taken, of_left, oldest = split_amounts(table.dirty.norms, table.dirty.since, taken)
    left = RowTotals(every - int(rows), (every - int(rows)) * size, math.sqrt(of_left))
    return RowTotals(int(rows), int(rows) * size, math.sqrt(of_taken)), left, int(oldest)
