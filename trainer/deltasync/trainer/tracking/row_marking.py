"""Stamps the rows of a rank when they change.

The training thread looks up rows and ends steps. Rows change in backward, whose hooks run in autograd's threads.
Reading threads also settle marks, between steps. The gate protects marks and stamps.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import Contradiction, NotFound
from deltasync.trainer.tracking.compared_rows import differing_rows
from deltasync.trainer.tracking.module_tensors import fused_collections, modules_with_buffers
from deltasync.trainer.tracking.modules import table_fqn
from deltasync.trainer.tracking.shards import (
    DenseOptimizers,
    TrackedTable,
    check_deletable,
    flush_caches,
    follow_replaced,
    reset_rows,
)
from deltasync.trainer.tracking.stamps import CLOCK_END, STAMP_BYTES, RowStamps
from deltasync.trainer.tracking.torchrec_hooks import (
    Hooks,
    listen_to_evictions,
    listen_to_forwards,
    listen_to_gradients,
    listen_to_lookups,
    listen_to_maps,
    listen_to_output_dists,
    listen_to_rewrites,
)
from deltasync.trainer.tracking.tracked_model import TrackedModel, TrackerOptions
from deltasync.trainer.tracking.update_gate import UpdateGate

_NAMED_ROWS = 10


class Verification:
    """Compares the rows of fused tables with copies. Reads always compare the rows of other tables."""

    def __init__(self, tables: Sequence[TrackedTable], stamps: RowStamps) -> None:
        self._tables, self._stamps = tables, stamps
        self._copies = {
            number: [tracked.weight.clone() for tracked in table.shards]
            for number, table in enumerate(tables)
            if table.fused
        }
        # Tables to leave out of the next check, because the user paused marking while they changed.
        self.excused = set[int]()
        self._cursor = stamps.tick()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies)

    def check(self) -> None:
        """Compare all rows with the copies, and mark rows that have changed without a mark."""
        if self._stamps.clock <= self._cursor:  # The clock has restarted.
            self._cursor = 0
        unseen = {number: self._unseen(number) for number in self._copies}
        self.renew()
        missed = {number: ids for number, ids in unseen.items() if len(ids) and number not in self.excused}
        self.excused.clear()
        for number, ids in missed.items():
            self._stamps.stamp(number, ids)
        if missed:
            raise Contradiction(
                "; ".join(self._what_changed(number, ids) for number, ids in missed.items())
                + ". No hook of the tracker has seen the change: call the tracker's mark(table, ids) or "
                "mark_all(table) after the code that changes them. The next read offers these rows."
            )

    def renew(self) -> None:
        """Copy the current rows."""
        for number, copies in self._copies.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                copy.copy_(tracked.weight)
        # At the clock's end, leave the restart to the next read.
        self._cursor = CLOCK_END - 1 if self._stamps.clock == CLOCK_END else self._stamps.tick()

    def _unseen(self, number: int) -> torch.Tensor:
        """Local ids of a table's rows that differ from the copies without a later stamp: int64 [n]."""
        shards = zip(self._tables[number].shards, self._copies[number], strict=True)
        differing = torch.stack([differing_rows(tracked.weight, copy) for tracked, copy in shards]).any(dim=0)
        return torch.nonzero(differing & (self._stamps.of(number).abs() <= self._cursor)).squeeze(1)

    def _what_changed(self, number: int, ids: torch.Tensor) -> str:
        rows, more = (ids + self._tables[number].row_offset).tolist(), len(ids) - _NAMED_ROWS
        named = ", ".join(map(str, rows[:_NAMED_ROWS])) + (f" and {more} more" if more > 0 else "")
        return f"table {self._tables[number].name!r}: rows {named} have changed, but are not marked"


@dataclass
class TrackerCost:
    """The cost of tracking so far. With a GPU, seconds are time on the host.

    Attributes:
        marking_seconds: time to record the ids of lookups, in backward.
        marking_bytes: bytes of these ids.
        compaction_seconds: time to stamp the rows of these ids.
        compaction_bytes: bytes of the written stamps.
        reading_seconds: time to find and gather changed rows, in all reading threads.
        reading_bytes: bytes of the ids and values copied for readers.
    """

    marking_seconds: float = 0.0
    marking_bytes: int = 0
    compaction_seconds: float = 0.0
    compaction_bytes: int = 0
    reading_seconds: float = 0.0
    reading_bytes: int = 0

    def __post_init__(self) -> None:
        self._reading = threading.Lock()  # Several threads may read at once; the gate protects everything else.

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.marking_seconds + self.compaction_seconds + self.reading_seconds

    def as_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)

    def add_reading(self, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Add to the cost of reading."""
        with self._reading:
            self.reading_seconds += seconds
            self.reading_bytes += nbytes

    @contextmanager
    def timed_reading(self) -> Iterator[None]:
        """Add the time of the block to the cost of reading."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_reading(seconds=time.perf_counter() - started)


_MOST_BYTES, _MOST_LOOKUPS = 64 << 20, 1024


class RowMarking:
    """Stamps rows of a model after lookups, evictions, rewrites, dense updates and explicit marks.

    It keeps the ids of a lookup, without a copy, until the end of the step, and only then stamps their rows. If
    ranks share the model, it stamps them during the output dists of the next step.

    Attributes:
        changes: number of steps, explicit marks and rewrites of whole tables.
    """

    def __init__(
        self,
        tracked: TrackedModel,
        stamps: RowStamps,
        gate: UpdateGate,
        cost: TrackerCost,
        options: TrackerOptions,
    ) -> None:
        self.changes = 0
        self._tracked, self._tables = tracked, tracked.tables
        self._numbers = {table.name: number for number, table in enumerate(tracked.tables)}
        self._fused = {table.name for table in tracked.tables if table.fused}
        self._stamps, self._gate, self._cost, self._options = stamps, gate, cost, options
        self._verification = Verification(tracked.tables, stamps) if options.verify else None
        self._dense_optimizers = DenseOptimizers()
        self._hooks = Hooks()
        self._rewrites = list[bool]()  # By rewrite in progress, whether rows were already changing before it.
        self._places = {kernel: stamps.places(lookups) for kernel, lookups in tracked.lookups.items()}
        self._waiting = list[tuple[KeyedJaggedTensor, nn.Module]]()
        self._waiting_bytes = self._steps_waited = 0
        self._overlaps = any(module._env.world_size > 1 for module in tracked.modules.values())
        self._paused = threading.local()  # Its `depth` is the number of `pause` blocks that a thread is in.

    def listen(self, model: nn.Module) -> None:
        """Register hooks with TorchRec and PyTorch for all changes of rows."""
        hooks = self._hooks
        listen_to_lookups(hooks, model, self.record_lookup)
        listen_to_evictions(hooks, model, self._mark_evicted)
        listen_to_rewrites(hooks, model, self._begin_rewrite, self._end_rewrite)
        if not all(table.fused for table in (*self._tables, *self._tracked.replicas)):
            hooks.undo_with(self._dense_optimizers.listen())
        if any(table.compared for table in self._tables):
            listen_to_gradients(hooks, model, self._begin_updates)
            listen_to_forwards(hooks, [each for _, each in fused_collections(model)], self._begin_updates)
        if self._options.dense:
            listen_to_forwards(hooks, modules_with_buffers(model), self._begin_updates)
        # Every forward moves rows between a kernel and its cache, so no flush may run at the same time.
        shards = [shard for table in self._tables for shard in table.shards]
        cached = {id(shard.cached_in): shard.cached_in for shard in shards if shard.cached_in}
        listen_to_forwards(hooks, cached.values(), self._begin_updates)
        if self._options.id_maps:
            listen_to_maps(hooks, model, self._begin_updates)
        if self._overlaps:
            listen_to_output_dists(hooks, model, self._stamp_waiting)

    def close(self) -> None:
        """Stop listening."""
        self._hooks.remove()

    @property
    def nbytes(self) -> int:
        """Bytes of ids whose rows are not stamped yet, and of copies to compare rows with."""
        checks = (self._verification, self._tracked.unpublished)
        compared = [*self._tracked.id_maps, *(each for each in checks if each)]
        return self._waiting_bytes + sum(each.nbytes for each in compared)

    # -- lookups

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """Mark the rows of a lookup when its backward runs. TorchRec calls this after each lookup."""
        # Some pipelines run backward a step later than the lookup. Marking now, or in
        # `register_post_odist_tracker_fn`, could offer a row before its update and never again. Evaluation has no
        # backward and therefore marks nothing.
        if output.requires_grad and kernel in self._places:
            paused = getattr(self._paused, "depth", 0) > 0
            if not paused:
                self._gate.training_here()
            output.register_hook(partial(self._mark_lookup, features, kernel, paused))  # type: ignore[no-untyped-call]

    def _mark_lookup(
        self, features: KeyedJaggedTensor, kernel: nn.Module, paused: bool, _gradient: torch.Tensor
    ) -> None:
        """Keep the ids of a lookup. Runs in its backward, before the rows change, in a thread of autograd."""
        with self._gate:
            self._gate.updating = True
            if paused:  # Nevertheless, other threads must not read half-changed rows.
                if self._verification:
                    self._verification.excused.update(self._places[kernel][:, 0].tolist())
                return
            started = time.perf_counter()
            nbytes = features.values().nbytes
            self._waiting.append((features, kernel))
            self._waiting_bytes += nbytes
            self._cost.marking_bytes += nbytes
            self._cost.marking_seconds += time.perf_counter() - started
            # The trainer may overwrite ids of an unshared kernel. Without steps and reads, ids would pile up.
            full = self._waiting_bytes > _MOST_BYTES or len(self._waiting) > _MOST_LOOKUPS
            if full or kernel in self._tracked.alone:
                self._stamp_waiting()

    def _stamp_waiting(self) -> None:
        """Stamp the rows of all lookups so far."""
        with self._gate:
            self._steps_waited = 0
            if not self._waiting:
                return
            started = time.perf_counter()
            ids = sum(self._stamps.stamp_lookup(self._places[kernel], its) for its, kernel in self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            self._cost.compaction_bytes += ids * STAMP_BYTES
            self._cost.compaction_seconds += time.perf_counter() - started

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not mark the lookups of this thread within the block."""
        self._paused.depth = getattr(self._paused, "depth", 0) + 1
        try:
            yield
        finally:
            self._paused.depth -= 1

    # -- steps and reads

    def end_step(self) -> None:
        """Record that an optimizer step is complete. For the training thread."""
        self._hooks.check()
        self._gate.training_here()
        if not self._overlaps or self._steps_waited:  # Ids wait for at most one more step.
            self._stamp_waiting()
        self._steps_waited += 1
        self._rewrites.clear()
        self._gate.end_updates()
        self.changes += 1

    def settle(self) -> None:
        """Stamp all rows that have changed so far, with or without a lookup. Call within the gate's `reading`."""
        self._stamp_waiting()
        with self._cost.timed_reading():
            flush_caches(self._tables)
            if self._tracked.unpublished:
                self._tracked.unpublished.check()
            follow_replaced(self._tables)
            self.follow_maps()
            self._stamps.compare()
            if self._verification:
                self._verification.check()

    def follow_maps(self) -> None:
        """Read the maps again, and stamp the rows whose raw id has changed. Call within the gate."""
        for id_map in self._tracked.id_maps:
            changed = id_map.update()
            for number in (self._numbers.get(fqn) for fqn in (id_map.of, id_map.tables[0].name)):
                if number is not None:
                    self._stamps.stamp(number, changed.to(self._tables[number].device))

    def restore(self) -> None:
        """Continue after the stamps were restored. Call within the gate."""
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._verification:
            self._verification.renew()

    # -- explicit marks, see `Tracker`

    def mark(self, table: str, ids: torch.Tensor) -> None:
        """Stamp rows of a table, by global ids."""
        number = self._number(table)
        local = self._tables[number].local_ids(ids)
        with self._gate:
            self._stamps.stamp(number, local)
            self.changes += 1

    def offer_again(self, table: str, ids: torch.Tensor) -> None:
        """Stamp rows of a table again, by global ids: deleted rows as deleted, others as changed."""
        number = self._number(table)
        local = self._tables[number].local_ids(ids)
        with self._gate:
            deleted = self._stamps.of(number)[local] < 0
            self._stamps.stamp(number, local[~deleted])
            if deleted.any():
                self._stamps.stamp_deleted(number, local[deleted])
            self.changes += len(local) > 0

    def delete(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Reset rows of a table, by global ids, and stamp them as deleted; return their local ids on this rank."""
        replica = next((each for each in self._tracked.replicas if each.name == table), None)
        ours = replica or self._tables[self._number(table)]
        check_deletable(ours.table)
        local = ours.local_ids(ids)
        with self._gate:
            self._stamp_waiting()  # Stamp earlier lookups before the delete.
            follow_replaced([ours])
            reset_rows(ours, local)
            if not ours.fused:
                for tracked in ours.shards:
                    self._dense_optimizers.reset(tracked.weight, local)
            if replica is None:
                self._stamps.stamp_deleted(self._number(table), local)
                self.changes += 1
        return local

    def mark_all(self, table: str | None) -> None:
        """Stamp every row of a table, or of all tables."""
        numbers = range(len(self._tables)) if table is None else [self._number(table)]
        with self._gate:
            for number in numbers:
                self._stamps.stamp_all(number)
            self.changes += 1

    def mark_rewritten(self, tables: Iterable[str]) -> None:
        """Stamp every row of tables, except deleted rows that are still zeros."""
        with self._gate:
            for fqn in tables:
                self._stamps.stamp_present(self._number(fqn))
            self.changes += 1

    # -- other hooks

    def _begin_rewrite(self, tables: Iterable[str]) -> None:
        with self._gate:
            self._rewrites.append(self._gate.updating)
            self._gate.updating = True
        self.mark_rewritten(self._fused.intersection(tables))

    def _end_rewrite(self, tables: Iterable[str]) -> None:
        self.mark_rewritten(self._fused.intersection(tables))
        # If a rewrite fails midway, readers wait for the end of the step.
        if self._rewrites and not self._rewrites.pop():
            self._gate.end_updates()

    def _begin_updates(self, *_: object) -> None:
        if not self._gate.updating:
            with self._gate:
                self._gate.updating = True

    def _mark_evicted(self, name: str, module: ShardedEmbeddingModule, evicted: Mapping[str, Any]) -> None:
        # TorchRec calls this at every lookup, also in evaluation. Usually it evicts nothing and no row changes.
        by_fqn = {table_fqn(name, module, table): ids for table, ids in evicted.items() if ids is not None}
        with self._gate:
            for fqn in self._numbers.keys() & by_fqn.keys():
                self._gate.updating = True
                self._stamps.stamp(self._numbers[fqn], by_fqn[fqn])

    def _number(self, table: str) -> int:
        if table not in self._numbers:
            raise NotFound(f"no table {table!r} is tracked on this rank; there are: {', '.join(self._numbers)}")
        return self._numbers[table]
