"""The tracker: which rows of this rank have changed, for each of its consumers.

tracker = Tracker(model, TrackerOptions(consumers=["publisher"], mode=TrackingMode.EMBEDDING))
for ...:
    pipeline.progress(batches)
    tracker.step()
delta = tracker.get_delta("publisher")
...  # send delta.rows
tracker.acknowledge(delta.token)
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.errors import Contradiction, NotFound
from deltasync.trainer.tracking import state
from deltasync.trainer.tracking.attachment import find
from deltasync.trainer.tracking.consumers import Consumer
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.delta import Delta, Token, check_ranked
from deltasync.trainer.tracking.gate import UpdateGate
from deltasync.trainer.tracking.hooks import (
    Hooks,
    listen_to_evictions,
    listen_to_gradients,
    listen_to_lookups,
    listen_to_output_dists,
)
from deltasync.trainer.tracking.marks import LookupMarks
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.modules import table_fqn
from deltasync.trainer.tracking.options import DEFAULT_CONSUMER, TrackerOptions
from deltasync.trainer.tracking.reading import delta_rows, gather_due, to_host
from deltasync.trainer.tracking.shards import TrackedShard, flush_caches
from deltasync.trainer.tracking.stamps import CLOCK_END, RowStamps


class Tracker:
    """Knows which rows of this rank have changed since each consumer last acknowledged a read.

    Attributes:
        tables: what is tracked.
        steps: optimizer steps completed.
        changes: those, and marks from outside.
        cost: what tracking has cost so far.
    """

    def __init__(self, model: nn.Module, options: TrackerOptions | None = None) -> None:
        """Attach to a model.

        Args:
            model: a model under `DistributedModelParallel`, or any other; with its weights loaded.
            options: what to track, and for whom.

        Raises:
            InvalidInput: the model has tables whose rows cannot be tracked, or not in the mode wanted.
        """
        self._options = options or TrackerOptions()
        found = find(model, self._options)
        self.tables, self._modules = found.tables, found.modules
        self._numbers = {table.name: number for number, table in enumerate(self.tables)}
        self._stamps = RowStamps(self.tables)
        self._gate = UpdateGate(self.tables[0].device if self.tables else torch.device("cpu"))
        self._consumers: dict[str, Consumer] = {}
        self.cost = TrackerCost()
        self._marks = LookupMarks(found.lookups, self._stamps, self.cost)
        # A lone rank's ids lie where its batch does, which may be filled anew before the next output dist.
        self._overlaps = self._options.auto_compact and dist.is_initialized() and dist.get_world_size() > 1
        self._paused = threading.local()
        self._steps_uncompacted = 0
        self.steps = 0
        self.changes = 0
        for name in self._options.consumers:
            self.add_consumer(name)
        self._listen(model)

    # -- what happens to rows

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """See to it that the rows of a lookup are marked when they change. Called by TorchRec after each."""
        # They change in backward, which some pipelines run a step later than the lookup: marking now, or in
        # `register_post_odist_tracker_fn`, could offer a row before its update and never again. Evaluation has
        # no backward, and marks nothing.
        if not output.requires_grad or not self._marks.knows(kernel):
            return
        if getattr(self._paused, "depth", 0):  # Not marked, but others must not read rows half changed.
            output.register_hook(self._begin_updates)  # type: ignore[no-untyped-call]
        else:
            self._gate.training_here()
            output.register_hook(lambda _gradient: self._mark_lookup(features, kernel))  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Note that an optimizer step is complete. To be called after each, by the thread that trains.

        Raises:
            Contradiction: another function was put in the place of the tracker's hooks.
        """
        self._hooks.check()
        self._gate.training_here()
        if not self._overlaps or self._steps_uncompacted:
            self.trigger_compaction()
        self._steps_uncompacted += 1
        self._gate.end_updates()
        self.steps += 1
        self.changes += 1

    def trigger_compaction(self) -> None:
        """Stamp the rows that were marked. Reads do it, and with `auto_compact` TorchRec's output dists."""
        with self._gate:
            self._compact()

    def mark(self, table: str, ids: torch.Tensor) -> None:
        """Note that rows were changed from outside: by a reset, an import, a write of one's own.

        Args:
            table: its FQN.
            ids: global row ids, [n] of any integer type; those held by other ranks are left to them.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's.
        """
        number = self._number(table)
        held = self.tables[number].held(ids)
        with self._gate:
            self._stamps.stamp(number, held)
            self.changes += 1

    def mark_all(self, table: str | None = None) -> None:
        """Note that every row of a table, or of all tables, was changed from outside, say by a load."""
        numbers = range(len(self.tables)) if table is None else [self._number(table)]
        with self._gate:
            for number in numbers:
                self._stamps.stamp_all(number)
            self.changes += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Lookups made meanwhile by this thread mark nothing: for passes whose updates are not to be offered.

        If they have a backward, other threads' reads wait for the next `step()`, as after any.
        """
        self._paused.depth = getattr(self._paused, "depth", 0) + 1
        try:
            yield
        finally:
            self._paused.depth -= 1

    # -- consumers

    @property
    def consumers(self) -> list[str]:
        """Their names."""
        return list(self._consumers)

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
        """
        mode = mode or self._options.mode
        with self._gate.reading(timeout_seconds):
            if name in self._consumers:
                raise Contradiction(f"there is a consumer {name!r} already: remove it first, or take another name")
            self._settle_marks()
            self._consumers[name] = Consumer.starting(name, mode, self._tick(), self.tables)

    def remove_consumer(self, name: str) -> None:
        """Keep track for it no longer.

        Raises:
            NotFound: there is no such consumer.
        """
        with self._gate:
            del self._consumers[self._consumer(name).name]

    def resync(self, consumer: str | None = None) -> None:
        """Offer every row to a consumer, as to one that has nothing. Tokens of earlier reads move nothing."""
        with self._gate:
            known = self._consumer(consumer)
            with known.lock:
                self._consumers[known.name] = known.emptied()

    def clear(self, consumer: str | None = None) -> None:
        """Forget what has changed so far: for one consumer, or for all."""
        for name in self.consumers if consumer is None else [consumer]:
            self.acknowledge(self._read(self._consumer(name), None, values=False).token)

    # -- reading

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
        return self._handed_out(self._read(self._consumer(consumer), timeout_seconds))

    def get_delta_ids(self, consumer: str | None = None, timeout_seconds: float | None = None) -> Delta:
        """As `get_delta`, without values."""
        delta = self._read(self._consumer(consumer), timeout_seconds, values=False)
        rows = {fqn: replace(rows, values=None, first=None) for fqn, rows in delta.rows.items()}
        return self._handed_out(replace(delta, rows=rows))

    def top_k(self, consumer: str | None = None, k: int = 1, timeout_seconds: float | None = None) -> Delta:
        """The `k` rows of this rank, over all tables, that have changed most by L2 norm (`DeltaRows.norms`).

        The others stay due: acknowledging carries them over, and they go on growing.

        Raises:
            InvalidInput: the consumer's mode does not tell by how much rows have changed, or k is below 1.
        """
        known = self._consumer(consumer)
        check_ranked(known.mode, k)
        return self._handed_out(self._read(known, timeout_seconds, k=k))

    def acknowledge(self, token: Token) -> bool:
        """Move a consumer's cursor: what was read with this token has arrived.

        Returns:
            Whether it moved. It stays where it is if it has been further already, and for the token of a consumer
            that has since been removed, told to `resync` or loaded from a checkpoint.
        """
        known = self._consumers.get(token.consumer)
        if known is None:
            return False
        with known.lock:
            return token.registration is known and known.take(token)

    # -- what TorchRec's tracker tells too

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
        """Bytes held: stamps, marks that wait, copies of what is compared, first values."""
        consumers = sum(known.nbytes for known in list(self._consumers.values()))
        return self._stamps.nbytes + self._marks.nbytes + consumers

    def close(self) -> None:
        """Detach from the model."""
        self._hooks.remove()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this rank knows, for a checkpoint: tensors and plain values."""
        with self._gate.reading(None):
            self._settle_marks()
            return state.save(self.tables, self._stamps, list(self._consumers.values())) | {"steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint, whose weights the model has by now. Every rank calls it, before the first step.

        Args:
            saved: the states of all ranks that saved, whatever their number and their sharding; that of this rank
                alone is enough if both are the same.

        Rows that none of them knows, say of a table that has grown, count as changed. Consumers become those of
        the checkpoint; those it does not know begin now.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        with self._gate.reading(None):
            flush_caches(self.tables)
            loaded = state.load(self.tables, self._stamps, states)
            for name, consumer in self._consumers.items():
                if name not in loaded:
                    loaded[name] = Consumer.starting(name, consumer.mode, self._stamps.clock, self.tables)
            self._consumers = loaded
            self._marks.clear()
            self._tick()
            self.steps = max(int(one["steps"]) for one in states)

    # -- inside

    def _listen(self, model: nn.Module) -> None:
        self._hooks = Hooks()
        listen_to_lookups(self._hooks, model, self.record_lookup)
        listen_to_evictions(self._hooks, model, self._mark_evicted)
        if self._options.dense:
            listen_to_gradients(self._hooks, model, self._begin_updates)
        if self._overlaps:
            listen_to_output_dists(self._hooks, model, self.trigger_compaction)

    def _mark_lookup(self, features: KeyedJaggedTensor, kernel: nn.Module) -> None:
        with self._gate:
            self._gate.begin_updates()
            self._marks.add(features, kernel)

    def _begin_updates(self, _gradient: torch.Tensor) -> None:
        if not self._gate.updating:
            with self._gate:
                self._gate.begin_updates()

    def _mark_evicted(self, name: str, module: ShardedEmbeddingModule, evicted: Mapping[str, Any]) -> None:
        # It is told of every lookup, in evaluation too, and mostly of no eviction: then no row changes.
        found = {table_fqn(name, module, table): ids for table, ids in evicted.items() if ids is not None}
        with self._gate:
            for fqn in self._numbers.keys() & found.keys():
                self._gate.begin_updates()
                self._stamps.stamp(self._numbers[fqn], found[fqn])

    def _compact(self) -> None:
        self._steps_uncompacted = 0
        self._marks.compact()

    def _settle_marks(self) -> None:
        """Stamp all that has changed by now, seen in a lookup or not. Within the gate's `reading`."""
        self._compact()
        flush_caches(self.tables)
        self._stamps.compare()

    def _read(
        self, consumer: Consumer, timeout_seconds: float | None, *, values: bool = True, k: int | None = None
    ) -> Delta:
        # Who keeps first values must be given the current ones: they are the first after an acknowledgement.
        mode = consumer.mode if values or consumer.view else TrackingMode.ID_ONLY
        with ExitStack() as held:
            with self._gate.reading(timeout_seconds):
                # Not before: the thread that trains may need the consumer to end the step that is waited for.
                held.enter_context(consumer.lock)
                self._compact()  # It has a count of its own.
                held.enter_context(self.cost.timed_reading())
                self._settle_marks()
                gathered = gather_due(consumer, mode, self.tables, self._stamps)
                cursor = self._tick()
            with self._gate.side_stream():
                gathered = to_host(gathered)
            rows = delta_rows(consumer, gathered)
            delta = Delta(rows, Token(consumer.name, cursor, rows if consumer.view else {}, {}, consumer))
            delta = delta if k is None else consumer.most_changed(delta, k)
            consumer.memory.trim()
        return delta

    def _handed_out(self, delta: Delta) -> Delta:
        self.cost.add_reading(nbytes=delta.nbytes)
        if self._options.delete_on_read:
            self.acknowledge(delta.token)
        return delta

    def _tick(self) -> int:
        if self._stamps.clock == CLOCK_END:
            self._stamps.restart_clock()
            self._consumers = {name: known.renewed(0) for name, known in self._consumers.items()}
        return self._stamps.tick()

    def _consumer(self, name: str | None) -> Consumer:
        wanted = name or (DEFAULT_CONSUMER if DEFAULT_CONSUMER in self._consumers else None)
        if wanted is None and len(self._consumers) == 1:
            return next(iter(self._consumers.values()))
        if wanted not in self._consumers:
            raise NotFound(f"no consumer {wanted or DEFAULT_CONSUMER!r}; there are: {', '.join(self._consumers)}")
        return self._consumers[wanted]

    def _number(self, table: str) -> int:
        if table not in self._numbers:
            raise NotFound(f"no table {table!r} is tracked on this rank; there are: {', '.join(self._numbers)}")
        return self._numbers[table]
