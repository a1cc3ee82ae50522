"""Reading the rows that are due to a consumer into host memory.

Any thread may read. One that does not train waits for the end of a step.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from deltasync.core.digests import first_word, weights
from deltasync.core.tables import Shard
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.cursors import ConsumerCursor, Cursors
from deltasync.trainer.tracking.delta import DeletedRows, Delta, DeltaRows, PendingDelta, Token
from deltasync.trainer.tracking.options import TrackingMode, has_rows, sources
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.update_gate import UpdateGate


@dataclass(frozen=True, eq=False)
class GatheredRows:
    """Rows of one table.

    Attributes:
        ids: int64 [n], local row ids, ascending.
        values: of these rows, [n, d], by shard, if those are read.
        digests: of these rows, int64 [n], by shard, if they lie on a device.
        count: how many of them are meant, the first ones, int64 [1]; None = all.
    """

    ids: torch.Tensor
    values: list[torch.Tensor]
    digests: list[torch.Tensor]
    count: torch.Tensor | None = None

    def in_host_memory(self) -> Self:
        """The same in host memory: on a GPU, once its stream is done."""
        if not self.ids.is_cuda:
            return self
        values, digests = ([to_host(each) for each in both] for both in (self.values, self.digests))
        count = None if self.count is None else to_host(self.count)
        return type(self)(to_host(self.ids), values, digests, count)

    def trimmed(self) -> Self:
        """The rows that are meant, of those that are in host memory.

        Raises:
            RuntimeError: they are more than were thought possible.
        """
        if self.count is None:
            return self
        count = int(self.count)
        if count > len(self.ids):
            raise RuntimeError(f"{count} rows are due, at most {len(self.ids)} were expected: this is a defect")
        values, digests = ([each[:count] for each in both] for both in (self.values, self.digests))
        return type(self)(self.ids[:count], values, digests)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in host memory, once the current stream is done; itself where it is there already."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, eq=False)
class DueCount:
    """A count that a GPU was asked for.

    Attributes:
        cursor: rows stamped after it are counted.
        counts: by table, int64 [1] in host memory, once they have arrived.
        written: `RowStamps.written` when it was asked for.
        arrival: they have arrived; None where they were there at once.
    """

    cursor: int
    counts: list[torch.Tensor]
    written: list[int]
    arrival: torch.cuda.Event | None

    def bounds(self, stamps: RowStamps) -> list[int]:
        """At most how many rows of each table are stamped after the cursor now: no more than the table has.

        Waits for what the GPU was given before the count, not for what it was given since.
        """
        if self.arrival:
            self.arrival.synchronize()
        since = (now - then for now, then in zip(stamps.written, self.written, strict=True))
        rows = (len(of_table) for of_table in stamps.stamps)
        return [min(most, int(count) + more) for most, count, more in zip(rows, self.counts, since, strict=True)]


def due_ids(stamps: torch.Tensor, cursor: int, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows stamped after a cursor, where the stamps are.

    Args:
        stamps: int32 [rows].
        cursor: see there.
        bound: no more than so many rows are.

    Returns:
        Local row ids, int64 [bound], ascending, then zeros; and how many of them are meant, int64 [1].
    """
    due = stamps > cursor
    return torch.nonzero_static(due, size=bound, fill_value=0).squeeze(1), due.sum().view(1)


# Words are widened to 64 bits in blocks of so many.
_BLOCK_WORDS = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def row_digests(rows: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The digests of rows [n, cols] of a shard, where they lie: int64 [n], the bits of unsigned numbers."""
    words = rows.contiguous().view(_WORDS[rows.element_size()])
    factors = _weights(first_word(shard.col_offset, shard.table.dtype), words.shape[1], rows.device)
    mask = (1 << 8 * words.element_size()) - 1
    blocks = torch.split(words, max(1, _BLOCK_WORDS // words.shape[1]))
    return torch.cat([((block.long() & mask) * factors).sum(dim=1) for block in blocks])  # Modulo 2**64.


@lru_cache(256)
def _weights(first: int, words: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(first, words).view("i8").copy()).to(device)


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
