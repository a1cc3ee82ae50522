"""Tracks which rows of this rank have changed, separately for each consumer; see README.md for an example."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from deltasync.base.errors import Contradiction, NotFound
from deltasync.core.rows import RowBatch
from deltasync.kernels import digests, tracking
from deltasync.kernels.compiled import warm
from deltasync.trainer.distributed.ranks import begun_together, ranks_of
from deltasync.trainer.tracking import tracker_state
from deltasync.trainer.tracking.delta import (
    ConsumerCursor,
    Delta,
    DueCount,
    Gathered,
    batch_on_host,
    due_ids,
    gather,
    to_host,
)
from deltasync.trainer.tracking.row_marking import RowMarking, TrackerCost
from deltasync.trainer.tracking.shards import flush_caches, follow_replaced
from deltasync.trainer.tracking.stamps import CLOCK_END, NOTHING, RowStamps
from deltasync.trainer.tracking.torchrec_hooks import ReshardWatch
from deltasync.trainer.tracking.tracked_model import (
    DEFAULT_CONSUMER,
    TrackedModel,
    TrackerOptions,
    TrackingMode,
    tracked_model,
)
from deltasync.trainer.tracking.update_gate import UpdateGate

# If a compared table is larger, a read waits for an exact count, because the upper bound would be all its rows.
_MOST_COMPARED_BYTES = 64 << 20


class Tracker:
    """Knows which rows of this rank have changed since each consumer last acknowledged a read.

    Marking writes a stamp for each changed row, consumers have cursors, and reads return the rows with later
    stamps.

    Attributes:
        tables: this rank's share of the tracked tables.
        steps: number of complete optimizer steps.
        on_gpu: whether the tables are on a GPU, where reads run in parallel with training.
        attachments: how often the tracker has attached to the model: once, and again after each resharding.
        cost: the cost of tracking so far.
    """

    def __init__(
        self, model: nn.Module, options: TrackerOptions | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        """Attach to a model. The ranks that share it call this together, and wait for each other.

        Args:
            model: a model with its weights loaded, with or without `DistributedModelParallel`.
            options: what to track, and for whom; the same on all ranks, except `dense` and `replicas`.
            ranks: the ranks that share the model; None = all ranks with a part or a copy of it.

        Raises:
            InvalidInput: the model has tables whose rows cannot be tracked, or ranks have different options. All
                of these ranks raise it.
        """
        self._model = model
        self._options = options or TrackerOptions()
        self._ranks = ranks_of(model) if ranks is None else ranks
        self.cost = TrackerCost()
        self.steps = self.attachments = 0
        with begun_together("Tracker", self._options.of_all_ranks, self._ranks):
            warm(digests, tracking)  # Compile now, so that no step and no cut waits for a compiler.
            tracked = tracked_model(model, self._options)
            device = tracked.tables[0].device if tracked.tables else torch.device("cpu")
            self.on_gpu = device.type == "cuda"
            self._gate = UpdateGate(device)
            self._attach(tracked)
            for name in self._options.consumers:
                self.add_consumer(name)
        self._marking.listen(self._model)

    def _attach(self, tracked: TrackedModel) -> None:
        self.tables = tracked.tables
        self._reshard_watch = ReshardWatch(self._model)
        self._stamps = RowStamps(self.tables)
        self._marking = RowMarking(tracked, self._stamps, self._gate, self.cost, self._options)
        self._cursors = dict[str, ConsumerCursor]()
        self._counts = dict[str, DueCount]()
        self._bounded = not any(
            table.compared and table.table.nbytes > _MOST_COMPARED_BYTES for table in self.tables
        )
        self.attachments += 1

    def _attach_again(self, resharded: list[str]) -> None:
        """Attach to the new lookups of resharded modules, and to the rows that this rank has now.

        Rows that it had before keep their stamps, through a state like that of a checkpoint. All rows of the
        resharded modules are marked, because no hook has seen their new lookups yet.
        """
        with begun_together("Tracker, after the model was resharded", ranks=self._ranks):
            tracked = tracked_model(self._model, self._options)
        self._gate.training_here()
        with self._gate.reading(None):
            state = self.state_dict()
            before = self._marking
            before.close()
            self._attach(tracked)
            self._restore([state])
            self._marking.changes = before.changes
        self._marking.listen(self._model)
        prefixes = tuple(f"{name}." if name else "" for name in resharded)
        self._marking.mark_rewritten(table.name for table in self.tables if table.name.startswith(prefixes))

    # -- changes of rows, in the training thread

    @property
    def changes(self) -> int:
        """Number of steps, explicit marks and rewrites of whole tables."""
        return self._marking.changes

    def step(self) -> None:
        """Record a complete optimizer step. Call this in the training thread after each step.

        After `DistributedModelParallel.reshard`, the tracker attaches to the new lookups, and offers all rows of
        the resharded modules.

        Raises:
            Contradiction: other code has replaced a hook of the tracker.
            InvalidInput: the resharded model cannot be tracked, on this rank or another.
        """
        if resharded := self._reshard_watch.resharded():
            self._attach_again(resharded)
        self._marking.end_step()
        self.steps += 1

    def mark(self, table: str, ids: torch.Tensor) -> None:
        """Mark rows that were changed outside training, for example by a reset or an import.

        Args:
            table: the table's FQN.
            ids: global row ids, [n] of any integer type; ids of other ranks' rows are ignored.

        Raises:
            NotFound: there is no such table.
            InvalidInput: the table has no row of one of the ids.
        """
        self._marking.mark(table, ids)

    def offer_again(self, table: str, ids: torch.Tensor) -> None:
        """Offer rows again although they have not changed, and deleted rows as deletes. Otherwise like `mark`."""
        self._marking.offer_again(table, ids)

    def delete(self, table: str, ids: torch.Tensor) -> None:
        """Delete rows: set them and their optimizer states to zero, and offer the deletes to consumers.

        A row that changes afterwards, in a lookup's backward or by `mark`, is a new row. For a table without a
        fused optimizer, this resets its states in all optimizers that have stepped so far. A raw id that managed
        collision maps to a deleted row stays mapped to it. Call this in the training thread, between steps.

        Args:
            table: the table's FQN.
            ids: global row ids, [n] of any integer type; ids of other ranks' rows are ignored. If every rank has a
                copy of the table, all ranks delete the same rows after the same step.

        Raises:
            NotFound: this rank has no rows of such a table.
            InvalidInput: the table has no row of one of the ids, or is not an embedding table.
        """
        local = self._marking.delete(table, ids)
        shards = [tracked.shard for each in self.tables if each.name == table for tracked in each.shards]
        for cursor in list(self._cursors.values()):
            with cursor.lock:
                cursor.forget(shards, local)

    def mark_all(self, table: str | None = None) -> None:
        """Mark every row of a table, or of all tables, after a load for example.

        Raises:
            NotFound: there is no such table.
        """
        self._marking.mark_all(table)

    def pause(self) -> AbstractContextManager[None]:
        """Do not mark lookups of this thread within the block, for updates that consumers should not get.

        If such a lookup has a backward, reads in other threads wait for the next `step()`, as after any backward.
        """
        return self._marking.pause()

    # -- consumers

    @property
    def consumers(self) -> list[str]:
        """The names of the consumers."""
        return list(self._cursors)

    def add_consumer(
        self, name: str, mode: TrackingMode | None = None, timeout_seconds: float | None = None
    ) -> None:
        """Start to track changes for another consumer, from now on.

        Args:
            name: the consumer's name.
            mode: what its reads return in addition to ids; None = the mode of the options.
            timeout_seconds: how long a thread other than the training thread waits for the end of a step.

        Raises:
            Contradiction: there is a consumer of that name.
            DeltasyncError: the step did not end in time.
        """
        with self._gate.reading(timeout_seconds):
            if name in self._cursors:  # Check before anything changes.
                raise Contradiction(f"there is a consumer {name!r} already: remove it first, or use another name")
            self._marking.settle()
            cursor = ConsumerCursor.at(self._tick(), name, mode or self._options.mode, self.tables)
            self._cursors[name] = cursor

    def remove_consumer(self, name: str) -> None:
        """Stop tracking changes for a consumer.

        Raises:
            NotFound: there is no such consumer.
        """
        with self._gate:
            del self._cursors[self._cursor(name).name]

    def resync(self, consumer: str | None = None, cursor: int = NOTHING) -> None:
        """Offer every row to a consumer, as if it had none. Earlier deltas can no longer be acknowledged.

        Args:
            consumer: its name.
            cursor: the cursor of an earlier delta: offer only changes since then, if the tracker still knows them.

        Raises:
            NotFound: there is no such consumer.
            InvalidInput: the consumer has first values, which only exist for its current cursor.
        """
        with self._gate:
            ours = self._cursor(consumer)
            with ours.lock:
                # A cursor that is not below the clock is from before the clock was restarted.
                usable = NOTHING < cursor < self._stamps.clock
                self._cursors[ours.name] = ours.moved_back(cursor) if usable else ours.emptied()

    def offers_all(self, consumer: str | None = None) -> bool:
        """Whether the next read of a consumer returns every row."""
        return self._cursor(consumer).cursor == NOTHING

    def acknowledge(self, delta: Delta) -> bool:
        """Acknowledge that the rows of a delta have arrived, from any thread: moves the consumer's cursor.

        Returns:
            Whether the cursor moved. It does not move if it is already further, or if the consumer has since been
            removed, resynced or loaded from a checkpoint.
        """
        cursor = self._cursors.get(delta.consumer)
        if cursor is None:
            return False
        with cursor.lock:
            return delta.registration is cursor and cursor.advance(delta.cursor, delta.rows)

    # -- reading: safe from any thread

    def get_delta(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """Read the rows that have changed for a consumer, in its mode. Safe to call from any thread.

        Without `acknowledge`, the next read returns these rows again, and later changes.

        Args:
            consumer: its name; None = "default", or the only consumer.
            timeout_seconds: how long a thread other than the training thread waits for the end of a step.

        Raises:
            NotFound: there is no such consumer.
            DeltasyncError: the step did not end in time.
        """
        return self._read(consumer, timeout_seconds)

    def count_ahead(self, consumer: str | None = None) -> None:
        """Prepare a `begin_delta` after the next step. Call this in the training thread, between steps."""
        cursor = self._cursor(consumer)
        with self._gate.reading(None), self.cost.timed_reading():
            stamps = [self._stamps.of(number) for number in range(len(self.tables))]
            counts = [to_host((each > cursor.cursor).sum().view(1)) for each in stamps]
            arrival = self._gate.arrival()
        self._counts[cursor.name] = DueCount(cursor.cursor, counts, self._stamps.written.tolist(), arrival)

    def begin_delta(self, consumer: str | None = None) -> Delta:
        """Start a `get_delta` in the training thread without waiting for the rows; `Delta.result` waits.

        The delta has the current rows: GPU work that the thread launches later runs after the read. After a
        `count_ahead` one step before, this waits at most for the GPU to finish that earlier step. The delta has
        arrived when this returns on a CPU, without a count, for a consumer without rows or with first values, and
        if large tables are compared.
        """
        cursor = self._cursor(consumer)
        count = self._counts.pop(cursor.name, None)
        if count and (cursor.first_values or not (self._bounded and NOTHING < count.cursor <= cursor.cursor)):
            count = None
        return self._read(cursor.name, count=count)

    def get_delta_ids(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """Like `get_delta`, without values, except for a consumer with first values."""
        return self._read(consumer, timeout_seconds, ids_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: stamps, waiting marks, copies for comparisons, and first values."""
        cursors = list(self._cursors.values())
        return self._stamps.nbytes + self._marking.nbytes + sum(cursor.nbytes for cursor in cursors)

    def close(self) -> None:
        """Detach from the model."""
        self._marking.close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: tensors and plain values."""
        with self._gate.reading(None):
            self._marking.settle()
            state = tracker_state.save(self.tables, self._stamps, list(self._cursors.values()))
        return state | {"steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint whose weights the model has already loaded.

        Every rank calls it, before the first step. Rows that are in none of the states, for example of a table
        that has grown, count as changed. The checkpoint's consumers replace those of this tracker; a consumer that
        is not in the checkpoint starts now.

        Args:
            saved: the states of all ranks that saved the checkpoint; their number and sharding may differ. If
                neither differs, this rank's own state is enough.

        Raises:
            InvalidInput: on some rank, these are not states of a tracker, or they have a newer format.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        with begun_together("Tracker.load_state_dict", ranks=self._ranks), self._gate.reading(None):
            flush_caches(self.tables)
            self._restore(states)

    def _restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        follow_replaced(self.tables)
        self._marking.follow_maps()  # The maps came with the weights, so read them before restoring the stamps.
        restored = tracker_state.load(self.tables, self._stamps, states)
        for name, cursor in self._cursors.items():
            if name not in restored:
                restored[name] = ConsumerCursor.at(self._stamps.clock, name, cursor.mode, self.tables)
        self._cursors = restored
        self._tick()
        self._marking.restore()
        self.steps = max(int(one["steps"]) for one in states)

    # -- inside

    def _cursor(self, consumer: str | None) -> ConsumerCursor:
        """The cursor of a consumer; None means "default", or the only consumer."""
        if consumer is None and len(self._cursors) == 1:
            return next(iter(self._cursors.values()))
        name = DEFAULT_CONSUMER if consumer is None else consumer
        if name not in self._cursors:
            raise NotFound(f"no consumer {name!r}; there are: {', '.join(self._cursors)}")
        return self._cursors[name]

    def _tick(self) -> int:
        """Return the cursor after all stamps so far, and advance the clock. Call within the gate."""
        if self._stamps.clock == CLOCK_END:
            self._stamps.restart_clock()
            self._cursors = {name: cursor.moved_to(0) for name, cursor in self._cursors.items()}
        return self._stamps.tick()

    def _read(
        self,
        consumer: str | None,
        timeout_seconds: float | None = None,
        *,
        ids_only: bool = False,
        count: DueCount | None = None,
    ) -> Delta:
        """Read the rows that are due to a consumer. With a `count`, only launch the read on a GPU."""
        counts = dict[str, torch.Tensor]()
        with ExitStack() as stack:
            with self._gate.reading(timeout_seconds):
                cursor = self._cursor(consumer)
                # Not earlier: the training thread may need the cursor to end the step that this thread waits for.
                stack.enter_context(cursor.lock)
                self._marking.settle()
                stack.enter_context(self.cost.timed_reading())
                written = self._stamps.written.tolist()
                bounds = count.bounds([table.rows for table in self.tables], written) if count else None
                # The next first values are the acknowledged values, so these consumers always get values.
                values = bool(cursor.first_values) or not (ids_only or cursor.mode is TrackingMode.ID_ONLY)
                gathered = list[Gathered]()
                for number, table in enumerate(self.tables):
                    if bounds is None:
                        ids = self._stamps.due(number, cursor.cursor)
                    else:
                        of_table = self._stamps.of(number)
                        ids, counts[table.name] = due_ids(of_table, cursor.cursor, bounds[number])
                    if len(ids):
                        gathered += gather(table, ids, cursor.memory, values=values)
                deletes = self._deletes(cursor)
                cursor_after = self._tick()
            if count:
                # Needed for code that writes to rows before it marks them, and so without passing the gate.
                self._gate.hold_changes()
            with self._gate.side_stream(wait=count is None):
                rows = [batch_on_host(*each) for each in gathered]
                counts = {fqn: to_host(each) for fqn, each in counts.items()}
            arrival = self._gate.arrival() if count else None
            first = {batch.shard: cursor.first_of(batch) for batch in rows if cursor.first_values}
            cursor.memory.trim()
        delta = Delta(cursor.name, cursor_after, rows + deletes, first, cursor, counts, arrival)
        self.cost.add_reading(nbytes=delta.nbytes)
        return delta

    def _deletes(self, cursor: ConsumerCursor) -> list[RowBatch]:
        """The deleted rows that are due, by shard."""
        deletes = list[RowBatch]()
        for number, table in enumerate(self.tables):
            ids = self._stamps.deleted_later(number, cursor.cursor)
            if len(ids):
                global_ids = ids.cpu().numpy() + table.row_offset
                deletes += [RowBatch.deletes(tracked.shard, global_ids) for tracked in table.shards]
        return deletes
