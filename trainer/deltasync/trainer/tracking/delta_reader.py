"""Reading the rows that are due to a consumer into host memory.

Any thread may read. One that does not train waits for the end of a step.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.cursors import ConsumerCursor, Cursors
from deltasync.trainer.tracking.delta import DeletedRows, Delta, DeltaRows, Token
from deltasync.trainer.tracking.device_digests import row_digests
from deltasync.trainer.tracking.due_count import DueCount, due_ids
from deltasync.trainer.tracking.gathered_rows import GatheredRows, to_host
from deltasync.trainer.tracking.modes import TrackingMode, has_rows, sources
from deltasync.trainer.tracking.pending_delta import PendingDelta
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.update_gate import UpdateGate

Gathered = dict[TrackedTable, GatheredRows]
# Larger tables that are compared are gathered once it is known how many of their rows have changed.
_MOST_COMPARED_BYTES = 64 << 20


class DeltaReader:
    """Reads the rows that are due to consumers."""

    def __init__(
        self,
        tables: Sequence[TrackedTable],
        stamps: RowStamps,
        gate: UpdateGate,
        marking: RowMarking,
        cursors: Cursors,
        cost: TrackerCost,
    ) -> None:
        self._tables, self._stamps, self._gate = tables, stamps, gate
        self._marking, self._cursors, self._cost = marking, cursors, cost
        self._counts = dict[str, DueCount]()
        self._bounded = not any(table.compared and table.table.nbytes > _MOST_COMPARED_BYTES for table in tables)

    def read(
        self,
        cursor: ConsumerCursor,
        timeout_seconds: float | None = None,
        *,
        values: bool = True,
        k: float | None = None,
        per_table: bool = False,
    ) -> Delta:
        """What a consumer has not acknowledged yet.

        Args:
            cursor: the consumer's.
            timeout_seconds: how long another thread than the training one waits for the end of a step.
            values: whether to read values; those of a mode with first values are read in any case.
            k: read this number of rows, or below 1 this share of them: those that have changed most; None for all.
            per_table: count `k` in each table by itself.

        Raises:
            DeltasyncError: the step did not end in time.
        """
        # Current values become the first values when they are acknowledged.
        mode = cursor.mode if values or cursor.first_values else TrackingMode.ID_ONLY
        with ExitStack() as stack:
            with self._gate.reading(timeout_seconds):
                # Not before: the thread that trains may need the cursor to end the step that is waited for.
                stack.enter_context(cursor.lock)
                self._marking.compact_here()  # It has a count of its own.
                stack.enter_context(self._cost.timed_reading())
                self._marking.settle()
                gathered, deleted = self._gather_due(cursor, mode), self._deletes(cursor)
                position = self._cursors.tick()
            with self._gate.side_stream():
                gathered = {table: rows.in_host_memory() for table, rows in gathered.items()}
            rows = _delta_rows(cursor, gathered)
            kept = (rows, deleted) if cursor.first_values else ({}, {})
            delta = Delta(rows, Token(cursor.name, position, *kept, {}, cursor), deleted)
            delta = delta if k is None else cursor.most_changed(delta, k, per_table=per_table)
            cursor.memory.trim()
        return delta

    def count_ahead(self, cursor: ConsumerCursor) -> None:
        """Have it counted how many rows are due, for the next `begin`. In the thread that trains."""
        with self._gate.reading(None), self._cost.timed_reading():
            counts = [(stamps > cursor.cursor).sum().view(1) for stamps in self._stamps.stamps]
            found = [to_host(count) for count in counts]
            arrival = self._gate.arrival()
        self._counts[cursor.name] = DueCount(cursor.cursor, found, self._stamps.written.tolist(), arrival)

    def begin(self, cursor: ConsumerCursor) -> PendingDelta:
        """As `read`, of which nothing is waited for if `count_ahead` was called a step before.

        All is read at once where that does not do: for a consumer that has nothing, keeps first values, or has
        carried rows over, and where large tables are compared.

        Raises:
            DeltasyncError: as `read`.
        """
        count = self._counts.pop(cursor.name, None)
        alone = cursor.first_values or cursor.carried
        if count is None or not NOTHING < count.cursor <= cursor.cursor or alone or not self._bounded:
            delta = self.read(cursor)
            return PendingDelta(None, lambda: delta)
        with ExitStack() as stack:
            with self._gate.reading(None):
                stack.enter_context(cursor.lock)
                self._marking.compact_here()  # It has a count of its own.
                stack.enter_context(self._cost.timed_reading())
                self._marking.settle()
                launched, deleted = self._gather_bounded(cursor, count), self._deletes(cursor)
                token = Token(cursor.name, self._cursors.tick(), {}, {}, {}, cursor)
            self._gate.hold_changes()  # Who writes to rows and marks them then does not pass the gate before.
            with self._gate.side_stream(wait=False):
                arriving = {table: rows.in_host_memory() for table, rows in launched.items()}
            arrival = self._gate.arrival()
        return PendingDelta(arrival, lambda: Delta(_delta_rows(cursor, _trimmed(arriving)), token, deleted))

    def _gather_bounded(self, cursor: ConsumerCursor, count: DueCount) -> Gathered:
        """The rows that are due, as they are now, in copies where the tables are, and more than those."""
        gathered, bounds = {}, count.bounds(self._stamps)
        for table, stamps, bound in zip(self._tables, self._stamps.stamps, bounds, strict=True):
            if bound:
                ids, due = due_ids(stamps, cursor.cursor, bound)
                values = [live.index_select(0, ids) for live in sources(table, cursor.mode)]
                gathered[table] = GatheredRows(ids, values, _digests(table, cursor.mode, values), due)
        return gathered

    def _gather_due(self, cursor: ConsumerCursor, mode: TrackingMode) -> Gathered:
        """The rows that are due, as they are now, in copies where the tables are."""
        gathered: Gathered = {}
        for number, table in enumerate(self._tables):
            ids = _named(table, cursor, cursor.due(table, self._stamps, number))
            if len(ids):
                values = [cursor.memory.select(live, ids) for live in sources(table, mode)]
                gathered[table] = GatheredRows(ids, values, _digests(table, mode, values))
        return gathered

    def _deletes(self, cursor: ConsumerCursor) -> dict[str, DeletedRows]:
        """The deleted rows that are due, by FQN."""
        deletes = dict[str, DeletedRows]()
        if not self._stamps.any_deleted_later(cursor.cursor):
            return deletes
        for number, table in enumerate(self._tables):
            ids = self._stamps.deleted_later(number, cursor.cursor)
            if len(ids):
                shards = [tracked.shard for tracked in table.shards]
                deletes[table.name] = DeletedRows(ids.cpu() + table.row_offset, shards)
        return deletes


def _named(table: TrackedTable, cursor: ConsumerCursor, due: torch.Tensor) -> torch.Tensor:
    """Those of the rows that are due which have to be said: to who has nothing, a free row need not be."""
    if not table.table.of or cursor.cursor != NOTHING:
        return due
    named = table.shards[0].weight.any(dim=1)  # Without a copy of the rows.
    named[-1] = True  # A table without any row is one that nobody has published.
    return due[named[due]]


def _digests(table: TrackedTable, mode: TrackingMode, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of current rows on a device, by shard: made before the copy to the host, which they cover."""
    if table.device.type == "cpu" or not has_rows(mode):
        return []
    return [row_digests(each, tracked.shard) for tracked, each in zip(table.shards, values, strict=True)]


def _delta_rows(cursor: ConsumerCursor, gathered: Gathered) -> dict[str, DeltaRows]:
    """Rows in host memory as the consumer is given them, by FQN."""
    return {
        table.name: DeltaRows(
            rows.ids + table.row_offset if table.row_offset else rows.ids,
            [tracked.shard for tracked in table.shards],
            rows.values,
            cursor.first_rows(table, rows.ids),
            cursor.mode,
            rows.digests,
        )
        for table, rows in gathered.items()
    }


def _trimmed(arrived: Gathered) -> Gathered:
    """The rows that are due; tables without any are left out."""
    trimmed = {table: rows.trimmed() for table, rows in arrived.items()}
    return {table: rows for table, rows in trimmed.items() if len(rows.ids)}
