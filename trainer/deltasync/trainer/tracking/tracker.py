"""Tracks which rows of this rank have changed, separately for each consumer.

tracker = Tracker(model, TrackerOptions(consumers=["publisher"], mode=TrackingMode.EMBEDDING))
for ...:
    pipeline.progress(batches)
    tracker.step()
delta = tracker.get_delta("publisher")
...  # send delta.rows
tracker.acknowledge(delta.token)
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

from deltasync.kernels import digests, tracking
from deltasync.kernels.compiled import warm
from deltasync.trainer.distributed.ranks import ranks_of
from deltasync.trainer.distributed.start import begun_together
from deltasync.trainer.tracking import tracker_state
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.cursors import Cursors
from deltasync.trainer.tracking.delta import Delta, Token, check_ranked
from deltasync.trainer.tracking.delta_reader import DeltaReader
from deltasync.trainer.tracking.options import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.shards import flush_caches, follow_replaced
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.torchrec_hooks import ReshardWatch
from deltasync.trainer.tracking.tracked_model import TrackedModel, tracked_model
from deltasync.trainer.tracking.update_gate import UpdateGate


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
            InvalidInput: the model has tables whose rows cannot be tracked, or not in this mode, or ranks have
                different options. All of these ranks raise it.
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
        self._modules = tracked.modules
        self._reshard_watch = ReshardWatch(self._model)
        self._stamps = RowStamps(self.tables)
        self._marking = RowMarking(tracked, self._stamps, self._gate, self.cost, self._options)
        self._cursors = Cursors(self.tables, self._stamps, self._gate)
        self._reader = DeltaReader(
            self.tables,
            self._stamps,
            self._gate,
            self._marking,
            self._cursors,
            self.cost,
            delete_on_read=self._options.delete_on_read,
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

    def trigger_compaction(self) -> None:
        """Stamp the marked rows now. Reads and steps do this too, and so do output dists with `auto_compact`."""
        self._marking.lookups.compact()

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
        self._cursors.forget(table, self._marking.delete(table, ids))

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
        return self._marking.lookups.pause()

    # -- consumers

    @property
    def consumers(self) -> list[str]:
        """The names of the consumers."""
        return [cursor.name for cursor in self._cursors]

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
            InvalidInput: a table does not have what the mode reads.
            DeltasyncError: the step did not end in time.
        """
        with self._gate.reading(timeout_seconds):
            self._cursors.check_new(name)  # Before anything changes.
            self._marking.settle()
            self._cursors.add(name, mode or self._options.mode)

    def remove_consumer(self, name: str) -> None:
        """Stop tracking changes for a consumer.

        Raises:
            NotFound: there is no such consumer.
        """
        self._cursors.remove(name)

    def resync(self, consumer: str | None = None, cursor: int = NOTHING) -> None:
        """Offer every row to a consumer, as if it had none. Tokens of earlier reads expire.

        Args:
            consumer: its name.
            cursor: the cursor of an earlier token: offer only changes since then, if the tracker still knows them.

        Raises:
            NotFound: there is no such consumer.
            InvalidInput: the consumer has first values, which only exist for its current cursor.
        """
        self._cursors.resync(consumer, cursor)

    def offers_all(self, consumer: str | None = None) -> bool:
        """Whether the next read of a consumer returns every row.

        Raises:
            NotFound: there is no such consumer.
        """
        return self._cursors[consumer].cursor == NOTHING

    def clear(self, consumer: str | None = None) -> None:
        """Drop the changes so far, for one consumer or for all.

        Raises:
            NotFound: there is no such consumer.
        """
        for name in self.consumers if consumer is None else [consumer]:
            self.acknowledge(self._read(name, values=False).token)

    def acknowledge(self, token: Token) -> bool:
        """Acknowledge that the rows of a read have arrived, from any thread: moves the consumer's cursor.

        Returns:
            Whether the cursor moved. It does not move if it is already further, or if the consumer has since been
            removed, resynced or loaded from a checkpoint.
        """
        return self._cursors.acknowledge(token)

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
        """Prepare a `begin_delta` after the next step. Call this in the training thread, between steps.

        Raises:
            NotFound: there is no such consumer.
        """
        self._reader.count_ahead(self._cursors[consumer])

    def begin_delta(self, consumer: str | None = None) -> Delta:
        """Start a `get_delta` in the training thread without waiting for the rows; `Delta.result` waits.

        The delta has the current rows: GPU work that the thread launches later runs after the read. After a
        `count_ahead` one step before, this waits at most for the GPU to finish that earlier step. Otherwise (see
        `DeltaReader.begin`) and on a CPU, the delta has arrived when this returns.

        Raises:
            NotFound: there is no such consumer.
        """
        return self._reader.hand_out(self._reader.begin(self._cursors[consumer]))

    def get_delta_ids(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """Like `get_delta`, without values."""
        return self._read(consumer, timeout_seconds, values=False)

    def top_k(
        self,
        consumer: str | None = None,
        k: float = 1,
        timeout_seconds: float | None = None,
        *,
        per_table: bool = False,
    ) -> Delta:
        """Read the rows of this rank that have changed most, by L2 norm (`DeltaRows.norms`).

        The other rows stay due after `acknowledge`, and their change keeps adding up.

        Args:
            consumer: its name; None = "default", or the only consumer.
            k: number of rows, or if below 1 the share of changed rows, rounded up.
            timeout_seconds: how long a thread other than the training thread waits for the end of a step.
            per_table: apply `k` to each table instead of to all tables together.

        Raises:
            InvalidInput: the consumer's mode does not show by how much rows have changed, or `k` is neither a
                number of rows nor a share.
            NotFound: there is no such consumer.
            DeltasyncError: the step did not end in time.
        """
        check_ranked(self._cursors[consumer].mode, k)
        return self._read(consumer, timeout_seconds, k=k, per_table=per_table)

    # -- the model

    def get_tracked_modules(self) -> dict[str, ShardedEmbeddingModule]:
        """The sharded modules by FQN."""
        return dict(self._modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """The features that are looked up in each table of this rank."""
        return {table.name: list(table.features) for table in self.tables if table.features}

    @property
    def nbytes(self) -> int:
        """Bytes in memory: stamps, waiting marks, copies for comparisons, and first values."""
        return self._stamps.nbytes + self._marking.nbytes + self._cursors.nbytes

    def close(self) -> None:
        """Detach from the model."""
        self._marking.close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: tensors and plain values."""
        with self._gate.reading(None):
            self._marking.settle()
            state = tracker_state.save(self.tables, self._stamps, list(self._cursors))
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
            InvalidInput: on some rank, these are not states of a tracker, have a newer format, or a table lacks
                what a consumer's mode reads.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        with begun_together("Tracker.load_state_dict", ranks=self._ranks), self._gate.reading(None):
            flush_caches(self.tables)
            self._restore(states)

    def _restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        follow_replaced(self.tables)
        self._marking.follow_maps()  # The maps came with the weights, so read them before restoring the stamps.
        self._cursors.restore(tracker_state.load(self.tables, self._stamps, states))
        self._marking.restore()
        self.steps = max(int(one["steps"]) for one in states)

    def _read(self, consumer: str | None, timeout_seconds: float | None = None, **what: Any) -> Delta:
        while True:
            reader = self._reader
            delta = reader.read(self._cursors[consumer], timeout_seconds, **what)
            if reader is self._reader:  # Otherwise the model was resharded while this thread waited for the step.
                return reader.hand_out(delta)
