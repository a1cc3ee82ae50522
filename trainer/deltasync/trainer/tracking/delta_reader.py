"""Reads the rows that are due to a consumer into host memory.

Any thread may read. Threads other than the training thread wait for the end of a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.cursors import ConsumerCursor, Cursors
from deltasync.trainer.tracking.delta import DeletedRows, Delta, DeltaRows, Token
from deltasync.trainer.tracking.gpu import DueCount, LaunchedDelta, due_ids, row_digests, rows_to_host, to_host
from deltasync.trainer.tracking.options import TrackingMode, has_rows, sources
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.update_gate import UpdateGate

# If a compared table is larger, `begin` waits for an exact count, because the upper bound would be all its rows.
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
        *,
        delete_on_read: bool,
    ) -> None:
        self._tables, self._stamps, self._gate = tables, stamps, gate
        self._marking, self._cursors, self._cost = marking, cursors, cost
        self._delete_on_read = delete_on_read
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
        """Read everything that a consumer has not acknowledged yet.

        Args:
            cursor: the consumer's cursor.
            timeout_seconds: how long a thread other than the training thread waits for the end of a step.
            values: whether to return values in addition to ids.
            k: only read the rows that have changed most: this number, or if below 1 this share; None = all rows.
            per_table: apply `k` to each table instead of to all tables together.

        Raises:
            DeltasyncError: the step did not end in time.
        """
        # Read values for first values too: the acknowledged values become the next first values.
        mode = cursor.mode if values or cursor.first_values else TrackingMode.ID_ONLY
        rows = dict[str, DeltaRows]()
        with ExitStack() as stack:
            with self._settled(cursor, timeout_seconds, stack):
                for number, table in enumerate(self._tables):
                    ids = cursor.due(table, self._stamps, number)
                    if table.table.of and cursor.cursor == NOTHING:
                        ids = ids[_map_rows_in_use(table)[ids]]
                    if len(ids):
                        gathered = [cursor.memory.select(live, ids) for live in sources(table, mode)]
                        rows[table.name] = _delta_rows(table, mode, ids, gathered)
                deletes, position = self._deletes(cursor), self._cursors.tick()
            with self._gate.side_stream():
                rows = {fqn: rows_to_host(each) for fqn, each in rows.items()}
            if cursor.first_values:
                rows = {fqn: cursor.with_first(each) for fqn, each in rows.items()}
            first = (rows, deletes) if cursor.first_values else ({}, {})
            delta = Delta(rows, Token(cursor.name, position, *first, {}, cursor), deletes)
            delta = delta if k is None else cursor.most_changed(delta, k, per_table=per_table)
            cursor.memory.trim()
        return delta if values else delta.without_values()

    def count_ahead(self, cursor: ConsumerCursor) -> None:
        """Start to count the rows that are due, for the next `begin`. For the training thread."""
        with self._gate.reading(None), self._cost.timed_reading():
            counts = [(stamps > cursor.cursor).sum().view(1) for stamps in self._stamps.stamps]
            on_host = [to_host(count) for count in counts]
            arrival = self._gate.arrival()
        self._counts[cursor.name] = DueCount(cursor.cursor, on_host, self._stamps.written.tolist(), arrival)

    def begin(self, cursor: ConsumerCursor) -> Delta:
        """Read without waiting for a GPU, if `count_ahead` was called a step before. For the training thread.

        Otherwise this calls `read`. It also does so for a consumer without rows, with first values or with carried
        rows, and if large tables are compared.

        Raises:
            DeltasyncError: see `read`.
        """
        count = self._counts.pop(cursor.name, None)
        alone = cursor.first_values or cursor.carried
        if count is None or not NOTHING < count.cursor <= cursor.cursor or alone or not self._bounded:
            return self.read(cursor)
        rows, counts = dict[str, DeltaRows](), dict[str, torch.Tensor]()
        with ExitStack() as stack:
            with self._settled(cursor, None, stack):
                bounds = count.bounds([table.rows for table in self._tables], self._stamps.written.tolist())
                for table, stamps, bound in zip(self._tables, self._stamps.stamps, bounds, strict=True):
                    if bound:
                        ids, counts[table.name] = due_ids(stamps, cursor.cursor, bound)
                        gathered = [live.index_select(0, ids) for live in sources(table, cursor.mode)]
                        rows[table.name] = _delta_rows(table, cursor.mode, ids, gathered)
                deletes, position = self._deletes(cursor), self._cursors.tick()
            # Needed for code that writes to rows before it marks them, and so without passing the gate.
            self._gate.hold_changes()
            with self._gate.side_stream(wait=False):
                rows = {fqn: rows_to_host(each) for fqn, each in rows.items()}
                counts = {fqn: to_host(each) for fqn, each in counts.items()}
            arrival = self._gate.arrival()
        token = Token(cursor.name, position, {}, {}, {}, cursor)
        return LaunchedDelta(rows, counts, token, deletes, arrival)

    def hand_out(self, delta: Delta) -> Delta:
        """Add a delta to the cost, and acknowledge it with `delete_on_read`. Returns the delta."""
        self._cost.add_reading(nbytes=delta.nbytes)
        if self._delete_on_read:
            self._cursors.acknowledge(delta.token)
        return delta

    @contextmanager
    def _settled(self, cursor: ConsumerCursor, timeout_seconds: float | None, stack: ExitStack) -> Iterator[None]:
        """Within the block, no row changes and all changes are stamped. `stack` keeps the cursor locked."""
        with self._gate.reading(timeout_seconds):
            # Not earlier: the training thread may need the cursor to end the step that this thread waits for.
            stack.enter_context(cursor.lock)
            self._marking.lookups.compact_here()  # Before `timed_reading`, because its cost is counted separately.
            stack.enter_context(self._cost.timed_reading())
            self._marking.settle()
            yield

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


def _delta_rows(
    table: TrackedTable, mode: TrackingMode, ids: torch.Tensor, values: list[torch.Tensor]
) -> DeltaRows:
    """Gathered rows (local ids) on the table's device, without first values."""
    shards = [tracked.shard for tracked in table.shards]
    digests = list[torch.Tensor]()
    if table.device.type != "cpu" and has_rows(mode):  # Computed before the copy to the host, to protect it too.
        digests = [row_digests(each, shard) for shard, each in zip(shards, values, strict=True)]
    # Without an offset, the ids are not copied.
    global_ids = ids + table.row_offset if table.row_offset else ids
    return DeltaRows(global_ids, shards, values, None, mode, digests)


def _map_rows_in_use(table: TrackedTable) -> torch.Tensor:
    """A bool mask of the rows of a map that a new consumer needs: not free rows, which are zero by default."""
    in_use = table.shards[0].weight.any(dim=1)  # Does not copy the rows.
    in_use[-1] = True  # A table without any rows would count as unpublished.
    return in_use
