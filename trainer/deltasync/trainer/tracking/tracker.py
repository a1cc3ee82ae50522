"""The tracker: which rows of this rank have changed, for each of its consumers.

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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.kernels import changes, digests, id_maps, marks
from deltasync.kernels.compiled import warm
from deltasync.trainer.distributed.ranks import ranks_of
from deltasync.trainer.distributed.start import begun_together
from deltasync.trainer.tracking import tracker_state
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.cursors import Cursors
from deltasync.trainer.tracking.delta import Delta, PendingDelta, Token, check_ranked
from deltasync.trainer.tracking.delta_reader import DeltaReader
from deltasync.trainer.tracking.new_lookups import LookupsHeld
from deltasync.trainer.tracking.options import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.shards import TrackedShard, flush_caches, follow_replaced
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.tracked_model import TrackedModel, tracked_model
from deltasync.trainer.tracking.update_gate import UpdateGate


class Tracker:
    """Knows which rows of this rank have changed since each consumer last acknowledged a read.

    Three parts share the stamps: marking, which writes them, the consumers' cursors, and reading.

    Attributes:
        tables: what is tracked, as this rank holds it.
        attachments: 1, and one more for each time that the model's lookups were found to be others.
        cost: what tracking has cost so far.
    """

    def __init__(
        self, model: nn.Module, options: TrackerOptions | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        """Attach to a model. The ranks that share it call this together, and wait for each other.

        Args:
            model: a model under `DistributedModelParallel`, or any other; with its weights loaded.
            options: what to track, and for whom; the same on all of the ranks, but for `dense` and `replicas`.
            ranks: which ranks these are; None for those that have a share in the model's tables, or copies of it.

        Raises:
            InvalidInput: the model has tables whose rows cannot be tracked, or not in the mode wanted, or ranks
                have different options. All of the ranks raise it.
        """
        self._model, self._options = model, options or TrackerOptions()
        self._ranks = ranks_of(model) if ranks is None else ranks
        self.cost = TrackerCost()
        self.attachments = 0
        with begun_together("Tracker", self._options.of_all_ranks, self._ranks):
            warm(changes, digests, id_maps, marks)  # Here: no step, and no cut, may wait for a compiler.
            tracked = tracked_model(model, self._options)
            self._gate = UpdateGate(tracked.tables[0].device if tracked.tables else torch.device("cpu"))
            self._attach(tracked)
            for name in self._options.consumers:
                self.add_consumer(name)
        self._marking.listen(self._model, self.record_lookup, self._options)

    def _attach(self, tracked: TrackedModel) -> None:
        self.tables, self._modules = tracked.tables, tracked.modules
        self._lookups_held = LookupsHeld(self._model)
        self._stamps = RowStamps(self.tables)
        shared = any(module._env.world_size > 1 for module in tracked.modules.values())
        self._marking = RowMarking(
            tracked,
            self._stamps,
            self._gate,
            self.cost,
            overlaps=self._options.auto_compact and shared,
            verify=self._options.verify,
        )
        self._cursors = Cursors(self.tables, self._stamps, self._gate)
        self._reader = DeltaReader(self.tables, self._stamps, self._gate, self._marking, self._cursors, self.cost)
        self.attachments += 1

    def _attach_again(self, renewed: list[str]) -> None:
        """Go on with the lookups that modules have made anew, and the rows that this rank holds now.

        Rows that it held before keep their stamps, which its own state carries over. What it did not hold, and
        all that the new lookups may have changed by now, is marked: nobody has listened to them.
        """
        with begun_together("Tracker, after the model was resharded", ranks=self._ranks):
            tracked = tracked_model(self._model, self._options)
        self._gate.training_here()
        with self._gate.reading(None):
            self._marking.settle()
            state, before = self._state(), self._marking
            before.close()
            self._attach(tracked)
            self._restore([state])
            self._marking.changes = before.changes
        self._marking.listen(self._model, self.record_lookup, self._options)
        prefixes = tuple(f"{name}." if name else "" for name in renewed)
        self._marking.mark_rewritten(table.name for table in self.tables if table.name.startswith(prefixes))

    # -- what happens to rows: by the thread that trains

    @property
    def steps(self) -> int:
        """Optimizer steps completed."""
        return self._marking.steps

    @property
    def changes(self) -> int:
        """Optimizer steps completed, marks from outside, and changes found by `find_changes`."""
        return self._marking.changes

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """See to it that the rows of a lookup are marked when they change. Called by TorchRec after each."""
        self._marking.record_lookup(features, output, kernel)

    def step(self) -> None:
        """Note that an optimizer step is complete. To be called after each, by the thread that trains.

        Where the model was resharded since the last (`DistributedModelParallel.reshard`), the tracker attaches to
        its new lookups, and offers all rows of the modules resharded.

        Raises:
            Contradiction: another function was put in the place of the tracker's hooks.
            InvalidInput: the model was resharded so that it can no longer be tracked, on this rank or another.
        """
        if renewed := self._lookups_held.renewed():
            self._attach_again(renewed)
        self._marking.end_step()

    def trigger_compaction(self) -> None:
        """Stamp the rows that were marked. Reads do it, and with `auto_compact` TorchRec's output dists."""
        self._marking.compact()

    def mark(self, table: str, ids: torch.Tensor) -> None:
        """Note that rows were changed from outside: by a reset, an import, a write of one's own.

        Args:
            table: its FQN.
            ids: global row ids, [n] of any integer type; those held by other ranks are left to them.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's.
        """
        self._marking.mark(table, ids)

    def find_changes(self, consumer: str | None = None) -> None:
        """Add to `changes` if rows are due to a consumer, although no step has ended since: rows of a backward,
        say, or of a buffer. Reads all that is compared. By the thread that trains.

        Raises:
            NotFound: there is no such consumer.
        """
        due = self._read(consumer, values=False)
        if due.rows or due.deletes:
            self._marking.changes += 1

    def mark_held(self, table: str, ids: torch.Tensor) -> None:
        """Have rows offered again as they are, deleted ones as deletes. Otherwise as `mark`."""
        self._marking.mark_held(table, ids)

    def delete(self, table: str, ids: torch.Tensor) -> None:
        """Delete rows: they and what the optimizer keeps of them become zeros, and consumers are told.

        A row that changes afterwards, in a lookup's backward or by `mark`, is a new row. Where the optimizer is
        not fused, its state is reset in all optimizers that have stepped by now. A raw id that managed collision
        maps to such a row stays mapped to it. By the thread that trains, between steps.

        Args:
            table: its FQN.
            ids: global row ids, [n] of any integer type; those held by other ranks are left to them. Where every
                rank has a copy of the table, all ranks delete the same after the same step.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's, or it is none of embeddings.
        """
        self._cursors.forget(table, self._marking.delete(table, ids))

    def holds(self, table: str) -> bool:
        """Whether this rank has rows of a table, tracked here or a copy that another rank tracks."""
        return self._marking.holds(table)

    def mark_all(self, table: str | None = None) -> None:
        """Note that every row of a table, or of all tables, was changed from outside, say by a load.

        Raises:
            NotFound: there is no such table.
        """
        self._marking.mark_all(table)

    def pause(self) -> AbstractContextManager[None]:
        """Lookups made meanwhile by this thread mark nothing: for passes whose updates are not to be offered.

        If they have a backward, other threads' reads wait for the next `step()`, as after any.
        """
        return self._marking.pause()

    # -- consumers

    @property
    def consumers(self) -> list[str]:
        """Their names."""
        return [cursor.name for cursor in self._cursors]

    def add_consumer(
        self, name: str, mode: TrackingMode | None = None, timeout_seconds: float | None = None
    ) -> None:
        """Begin to keep track for one more: what changes from now on is new to it.

        Args:
            name: its name.
            mode: what it is given beside ids; None for that of the options.
            timeout_seconds: how long another thread than the training one waits for the end of a step.

        Raises:
            Contradiction: there is one of that name.
            InvalidInput: a table does not have what the mode reads.
            DeltasyncError: the step did not end in time.
        """
        with self._gate.reading(timeout_seconds):
            self._cursors.check_new(name)  # Before anything changes.
            self._marking.settle()
            self._cursors.add(name, mode or self._options.mode)

    def remove_consumer(self, name: str) -> None:
        """Keep track for it no longer.

        Raises:
            NotFound: there is no such consumer.
        """
        self._cursors.remove(name)

    def resync(self, consumer: str | None = None, cursor: int = NOTHING) -> None:
        """Offer every row to a consumer, as to one that has nothing. Tokens of earlier reads move nothing.

        Args:
            consumer: its name.
            cursor: of an earlier token: what has changed since is enough, where that is still known.

        Raises:
            NotFound: there is no such consumer.
            InvalidInput: rows are not known as they were at an earlier cursor, which the consumer's mode gives.
        """
        self._cursors.resync(consumer, cursor)

    def offers_all(self, consumer: str | None = None) -> bool:
        """Whether a consumer is offered every row, as one that has nothing.

        Raises:
            NotFound: there is no such consumer.
        """
        return self._cursors[consumer].cursor == NOTHING

    def clear(self, consumer: str | None = None) -> None:
        """Forget what has changed so far: for one consumer, or for all.

        Raises:
            NotFound: there is no such consumer.
        """
        for name in self.consumers if consumer is None else [consumer]:
            self.acknowledge(self._read(name, values=False).token)

    def acknowledge(self, token: Token) -> bool:
        """Move a consumer's cursor: what was read with this token has arrived. Safe to call from any thread.

        Returns:
            Whether it moved. It stays where it is if it has been further already, and for the token of a consumer
            that has since been removed, told to `resync` or loaded from a checkpoint.
        """
        return self._cursors.acknowledge(token)

    # -- reading: safe from any thread

    def get_delta(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """The rows that have changed for a consumer, as its mode has them. Safe to call from any thread.

        Reading moves nothing: reading again without `acknowledge` returns these rows again, and later ones.

        Args:
            consumer: its name; None for "default", or for the only one.
            timeout_seconds: how long another thread than the training one waits for the end of a step.

        Raises:
            NotFound: there is no such consumer.
            DeltasyncError: the step did not end in time.
        """
        return self._handed_out(self._read(consumer, timeout_seconds))

    def count_ahead(self, consumer: str | None = None) -> None:
        """Note that `begin_delta` follows after the next step. By the thread that trains, between steps.

        Raises:
            NotFound: there is no such consumer.
        """
        self._reader.count_ahead(self._cursors[consumer])

    def begin_delta(self, consumer: str | None = None) -> PendingDelta:
        """As `get_delta`, by the thread that trains, which need not wait for it: rows are read as they are now.

        Where `count_ahead` was called a step before, the thread waits on a GPU for that step at most, and what it
        launches from now on changes no row before it is read. Without, or where that does not do (see
        `DeltaReader.begin`), and on a CPU, the delta has arrived when this returns.

        Raises:
            NotFound: there is no such consumer.
        """
        return self._reader.begin(self._cursors[consumer]).then(self._handed_out)

    @property
    def on_gpu(self) -> bool:
        """Whether reads are launched on a GPU, beside what trains there."""
        return self._gate.streams

    def get_delta_ids(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """As `get_delta`, without values."""
        return self._handed_out(self._read(consumer, timeout_seconds, values=False).without_values())

    def top_k(
        self,
        consumer: str | None = None,
        k: float = 1,
        timeout_seconds: float | None = None,
        *,
        per_table: bool = False,
    ) -> Delta:
        """The rows of this rank that have changed most by L2 norm (`DeltaRows.norms`).

        The others stay due: acknowledging carries them over, and they go on growing.

        Args:
            consumer: its name; None for "default", or for the only one.
            k: how many rows, or below 1 which share of those that have changed, rounded up.
            timeout_seconds: how long another thread than the training one waits for the end of a step.
            per_table: count `k` in every table by itself, instead of in all together.

        Raises:
            InvalidInput: the consumer's mode does not tell by how much rows have changed, or `k` is neither.
            NotFound: there is no such consumer.
            DeltasyncError: the step did not end in time.
        """
        check_ranked(self._cursors[consumer].mode, k)
        return self._handed_out(self._read(consumer, timeout_seconds, k=k, per_table=per_table))

    # -- as in TorchRec's tracker, and what is held

    def get_tracked_modules(self) -> dict[str, ShardedEmbeddingModule]:
        """The sharded modules by FQN."""
        return dict(self._modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """The features that are looked up in each table of this rank."""
        return {table.name: list(table.features) for table in self.tables if table.features}

    @property
    def shards(self) -> list[TrackedShard]:
        """The shards of all tables, in order."""
        return [tracked for table in self.tables for tracked in table.shards]

    @property
    def nbytes(self) -> int:
        """Bytes in memory: stamps, marks that wait, copies of what is compared, first values."""
        return self._stamps.nbytes + self._marking.nbytes + self._cursors.nbytes

    def close(self) -> None:
        """Detach from the model."""
        self._marking.close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this rank knows, for a checkpoint: tensors and plain values."""
        with self._gate.reading(None):
            self._marking.settle()
            return self._state()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, whose weights the model has by now. Every rank calls it, before the first step.

        Rows that none of the states knows, say of a table that has grown, count as changed. Consumers become those
        of the checkpoint; those it does not know begin now.

        Args:
            saved: the states of all ranks that saved, whatever their number and their sharding; that of this rank
                alone is enough if both are the same.

        Raises:
            InvalidInput: on this rank or another, these are no states of trackers, or of a newer format, or a
                table lacks what a consumer's mode reads.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        with begun_together("Tracker.load_state_dict", ranks=self._ranks), self._gate.reading(None):
            flush_caches(self.tables)
            self._restore(states)

    def _state(self) -> dict[str, Any]:
        return tracker_state.save(self.tables, self._stamps, list(self._cursors)) | {"steps": self.steps}

    def _restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        follow_replaced(self.tables)
        self._marking.follow_maps()  # They came with the weights: their stamps are the ones restored.
        self._cursors.restore(tracker_state.load(self.tables, self._stamps, states))
        self._marking.restore(max(int(one["steps"]) for one in states))

    def _read(self, consumer: str | None, timeout_seconds: float | None = None, **what: Any) -> Delta:
        while True:
            reader = self._reader
            delta = reader.read(self._cursors[consumer], timeout_seconds, **what)
            if reader is self._reader:  # Else the model was resharded while another thread waited for the step.
                return delta

    def _handed_out(self, delta: Delta) -> Delta:
        self.cost.add_reading(nbytes=delta.nbytes)
        if self._options.delete_on_read:
            self.acknowledge(delta.token)
        return delta
