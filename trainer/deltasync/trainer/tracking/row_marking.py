"""Marking: the rows of a rank are stamped when they change.

The thread that trains looks rows up and ends steps. Rows change in backward, whose hooks run in threads of
autograd. Threads that read settle marks too, between steps. Marks and stamps are only touched within the gate.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import NotFound
from deltasync.trainer.tracking.cost import TrackerCost
from deltasync.trainer.tracking.module_tensors import fused_collections, modules_with_buffers
from deltasync.trainer.tracking.modules import table_fqn
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.rewrites import RewriteListener, listen_to_rewrites
from deltasync.trainer.tracking.row_reset import reset_rows
from deltasync.trainer.tracking.shards import TrackedTable, check_deletable, flush_caches, follow_replaced
from deltasync.trainer.tracking.stamps import STAMP_BYTES, LookupPlaces, RowStamps
from deltasync.trainer.tracking.torchrec_hooks import (
    Hooks,
    listen_to_evictions,
    listen_to_forwards,
    listen_to_gradients,
    listen_to_lookups,
    listen_to_maps,
    listen_to_output_dists,
)
from deltasync.trainer.tracking.tracked_model import Lookups, TrackedModel
from deltasync.trainer.tracking.update_gate import UpdateGate
from deltasync.trainer.tracking.verification import Verification


class DenseOptimizers:
    """The optimizers of this process that have stepped since `listen`."""

    def __init__(self) -> None:
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def listen(self) -> Callable[[], None]:
        """Note optimizers as they step; what is returned ends it."""
        return register_optimizer_step_post_hook(self._note).remove

    def reset(self, weight: torch.Tensor, ids: torch.Tensor) -> None:
        """Make what they keep of rows of a table what it is of new rows.

        Args:
            weight: [rows, dim], the table, which lies in the memory of a parameter.
            ids: int64 [n], of its rows.
        """
        for optimizer in list(self._stepped):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, state in _rows(weight, parameter, optimizer.state.get(parameter, {})):
                        # Adagrad's sum is the only state that need not begin with zeros.
                        first = group.get("initial_accumulator_value", 0) if key == "sum" else 0
                        state.data.index_fill_(0, ids, first)

    def _note(self, optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        self._stepped.add(optimizer)


def _rows(weight: torch.Tensor, parameter: torch.Tensor, states: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The parts of a parameter's states that belong to a table in its memory, by row; none if it is not there."""
    start = weight.storage_offset() - parameter.storage_offset()
    same_memory = weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    if not same_memory or not 0 <= start <= parameter.numel() - weight.numel():
        return []
    whole = weight.numel() == parameter.numel()
    found = []
    for key, state in states.items():
        if not isinstance(state, torch.Tensor):
            continue
        if state.numel() == parameter.numel():
            found.append((key, state.view(-1)[start : start + weight.numel()].view(len(weight), -1)))
        elif whole and state.numel() == len(weight):  # One value per row.
            found.append((key, state.view(-1, 1)))
    return found


_MOST_BYTES, _MOST_LOOKUPS = 64 << 20, 1024


class LookupMarks:
    """The ids of lookups, which are not copied, until there is time to sort them out by table.

    Attributes:
        nbytes: bytes of these ids.
    """

    def __init__(self, lookups: Lookups, stamps: RowStamps, cost: TrackerCost) -> None:
        self._places = {kernel: stamps.places(looked_up) for kernel, looked_up in lookups.items()}
        self._stamps, self._cost = stamps, cost
        self._waiting: list[tuple[KeyedJaggedTensor, nn.Module]] = []
        self.nbytes = 0

    def add(self, features: KeyedJaggedTensor, kernel: nn.Module) -> None:
        """Add the ids of a lookup of a kernel."""
        started = time.perf_counter()
        nbytes = features.values().nbytes
        self._waiting.append((features, kernel))
        self.nbytes += nbytes
        self._cost.marking_bytes += nbytes
        self._cost.marking_seconds += time.perf_counter() - started
        # Steps and reads stamp them; without any, they would pile up.
        if self.nbytes > _MOST_BYTES or len(self._waiting) > _MOST_LOOKUPS:
            self.compact()

    def compact(self) -> None:
        """Stamp the rows that were looked up."""
        if not self._waiting:
            return
        started = time.perf_counter()
        for features, kernel in self._waiting:
            self._cost.compaction_bytes += self._stamp(self._places[kernel], features) * STAMP_BYTES
        self.clear()
        self._cost.compaction_seconds += time.perf_counter() - started

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()
        self.nbytes = 0

    def _stamp(self, places: LookupPlaces, features: KeyedJaggedTensor) -> int:
        """Stamp the rows of a lookup; how many ids there are."""
        ids = features.values()
        if not ids.is_cuda:
            return self._stamps.stamp_looked_up(places, ids, _ends(features))
        parts = [(number, ids[part]) for number, part in _parts(places, features)]
        for number, part in parts:
            self._stamps.stamp(number, part)
        return sum(len(part) for _, part in parts)


def _ends(features: KeyedJaggedTensor) -> torch.Tensor:
    """Where the ids of bags begin and end, which lookups compute, or of keys that have not as many bags each."""
    if features.variable_stride_per_key():
        return torch.tensor(features.offset_per_key())
    ends: torch.Tensor = features.offsets()
    return ends


def _parts(places: LookupPlaces, features: KeyedJaggedTensor) -> Iterator[tuple[int, slice]]:
    """Number of each table looked up, and where its ids are among those of a lookup."""
    if places.only is not None:  # Where that is, a GPU would have to be asked for.
        yield places.only, slice(None)
        return
    ends = features.offset_per_key()
    for number, first, end in places.tables[:, :3].tolist():
        yield number, slice(ends[first], ends[end])


class _Paused(threading.local):
    """How many times a thread has paused marking, and not gone on."""

    depth = 0


class RowMarking:
    """Stamps the rows of a model: of lookups, evictions, rewrites and dense updates, and those marked by hand.

    Attributes:
        steps: optimizer steps completed.
        changes: those, and marks from outside.
    """

    def __init__(
        self,
        tracked: TrackedModel,
        stamps: RowStamps,
        gate: UpdateGate,
        cost: TrackerCost,
        *,
        overlaps: bool,
        verify: bool,
    ) -> None:
        """Listen to nothing yet.

        Args:
            tracked: the model.
            stamps: of its tables.
            gate: keeps reads away while rows change.
            cost: where the time of marking is added.
            overlaps: stamp the rows of a step during the next one's output dists, not at the step's end.
            verify: compare all rows with copies whenever all that has changed is stamped.
        """
        self._tables, self._stamps, self._gate, self._overlaps = tracked.tables, stamps, gate, overlaps
        self._numbers = {table.name: number for number, table in enumerate(tracked.tables)}
        self._id_maps, self._unpublished = tracked.id_maps, tracked.unpublished
        self._marks = LookupMarks(tracked.lookups, stamps, cost)
        self._replicas = {table.name: table for table in tracked.replicas}
        self._dense_optimizers = DenseOptimizers()
        self._fused = {table.name for table in tracked.tables if table.fused}
        self._lookups, self._alone = tracked.lookups, tracked.alone
        self._verification = Verification(tracked.tables, stamps) if verify else None
        self._hooks = Hooks()
        self._paused = _Paused()
        self._rewrites = list[bool]()
        self._steps_uncompacted = 0
        self.steps = 0
        self.changes = 0

    def listen(self, model: nn.Module, record_lookup: Callable[..., None], options: TrackerOptions) -> None:
        """Have TorchRec tell of what happens: of lookups to `record_lookup`, of all else to this object."""
        listen_to_lookups(self._hooks, model, record_lookup)
        listen_to_evictions(self._hooks, model, self._mark_evicted)
        listen_to_rewrites(self._hooks, model, RewriteListener(self._begin_rewrite, self._end_rewrite))
        if not all(table.fused for table in (*self._tables, *self._replicas.values())):
            self._hooks.undo_with(self._dense_optimizers.listen())
        if any(table.compared for table in self._tables):
            listen_to_gradients(self._hooks, model, self._begin_updates)
            fused = [collection for _, collection in fused_collections(model)]
            listen_to_forwards(self._hooks, fused, self._begin_updates)
        if options.dense:
            listen_to_forwards(self._hooks, modules_with_buffers(model), self._begin_updates)
        listen_to_forwards(self._hooks, self._cached_kernels(), self._begin_updates)
        if options.id_maps:
            listen_to_maps(self._hooks, model, self._begin_updates)
        if self._overlaps:
            listen_to_output_dists(self._hooks, model, self.compact)

    def close(self) -> None:
        """Listen no longer."""
        self._hooks.remove()

    @property
    def nbytes(self) -> int:
        """Bytes of marks that wait to be stamped, and of what rows are compared with."""
        compared = [*self._id_maps, *(each for each in (self._verification, self._unpublished) if each)]
        return self._marks.nbytes + sum(each.nbytes for each in compared)

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """See to it that the rows of a lookup are marked when they change. In the thread that trains."""
        # They change in backward, which some pipelines run a step later than the lookup: marking now, or in
        # `register_post_odist_tracker_fn`, could offer a row before its update and never again. Evaluation has
        # no backward, and marks nothing.
        if not output.requires_grad or kernel not in self._lookups:
            return
        if self._paused.depth:  # Not marked, but others must not read rows half changed.
            output.register_hook(partial(self._pass_over, kernel))  # type: ignore[no-untyped-call]
        else:
            self._gate.training_here()
            output.register_hook(partial(self._mark_lookup, features, kernel))  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """An optimizer step is complete. In the thread that trains.

        Raises:
            Contradiction: another function was put in the place of a hook.
        """
        self._hooks.check()
        self._gate.training_here()
        if not self._overlaps or self._steps_uncompacted:
            self.compact()
        self._steps_uncompacted += 1
        self._rewrites.clear()
        self._gate.end_updates()
        self.steps += 1
        self.changes += 1

    def compact(self) -> None:
        """Stamp the rows of the lookups seen so far."""
        with self._gate:
            self.compact_here()

    def compact_here(self) -> None:
        """As `compact`, for callers that hold the gate already."""
        self._steps_uncompacted = 0
        self._marks.compact()

    def settle(self) -> None:
        """Stamp all that has changed by now, seen in a lookup or not. Within the gate's `reading`.

        Raises:
            Contradiction: rows are verified, and some have changed unmarked.
            InvalidInput: what is outside of tables is no longer what was attached to, or a map of ids contradicts
                itself.
        """
        self.compact_here()
        flush_caches(self._tables)
        self._follow()
        self._stamps.compare()
        if self._verification:
            self._verification.check()

    def mark(self, table: str, ids: torch.Tensor) -> None:
        """Stamp rows of a table that were changed from outside, by global ids.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's.
        """
        number = self._number(table)
        local = self._tables[number].local_ids(ids)
        with self._gate:
            self._stamps.stamp(number, local)
            self.changes += 1

    def mark_held(self, table: str, ids: torch.Tensor) -> None:
        """Stamp rows of a table, by global ids, as what they are: there, or deleted.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's.
        """
        number = self._number(table)
        local = self._tables[number].local_ids(ids)
        with self._gate:
            held = self._stamps.not_deleted(number, local)
            deleted = self._stamps.deleted_of(number, local)
            self._stamps.stamp(number, held)
            if len(deleted):
                self._stamps.stamp_deleted(number, deleted)
            self.changes += len(local) > 0

    def holds(self, table: str) -> bool:
        """Whether this rank has rows of a table, tracked or a copy."""
        return table in self._numbers or table in self._replicas

    def delete(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Reset rows of a table, by global ids, and stamp them as deleted; the local ids of those held here.

        Raises:
            NotFound: there is no such table.
            InvalidInput: an id is none of the table's.
        """
        held = self._replicas.get(table) or self._tables[self._number(table)]
        check_deletable(held.table)
        local = held.local_ids(ids)
        with self._gate:
            self.compact_here()  # Lookups until now came before.
            follow_replaced([held])
            reset_rows(held, local)
            self._reset_dense(held, local)
            if held is not self._replicas.get(table):
                self._stamps.stamp_deleted(self._number(table), local)
                self.changes += 1
        return local

    def mark_all(self, table: str | None) -> None:
        """Stamp every row of a table, or of all.

        Raises:
            NotFound: there is no such table.
        """
        numbers = range(len(self._tables)) if table is None else [self._number(table)]
        with self._gate:
            for number in numbers:
                self._stamps.stamp_all(number)
            self.changes += 1

    def mark_rewritten(self, tables: Iterable[str]) -> None:
        """Stamp every row of tables, but for deleted ones that are still zeros."""
        with self._gate:
            for fqn in tables:
                self._stamps.stamp_held(self._number(fqn))
                self._stamps.stamp_refilled(self._number(fqn))
            self.changes += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Lookups made meanwhile by this thread mark nothing."""
        self._paused.depth += 1
        try:
            yield
        finally:
            self._paused.depth -= 1

    def follow_maps(self) -> None:
        """Read maps anew, and stamp the rows whose raw id has changed. Within the gate.

        Raises:
            InvalidInput: one contradicts itself.
        """
        for id_map in self._id_maps:
            changed = id_map.update()
            for number in (self._numbers.get(fqn) for fqn in (id_map.of, id_map.tables[0].name)):
                if number is not None:
                    self._stamps.stamp(number, changed.to(self._tables[number].device))

    def restore(self, steps: int) -> None:
        """Go on after so many steps, whose stamps are restored. Within the gate."""
        self._marks.clear()
        if self._verification:
            self._verification.renew()
        self.steps = steps

    def _cached_kernels(self) -> list[nn.Module]:
        """The kernels with a cache, whose rows move in every forward: no flush may run beside one."""
        found = {id(shard.cached_in): shard.cached_in for table in self._tables for shard in table.shards}
        return [kernel for kernel in found.values() if kernel]

    def _reset_dense(self, table: TrackedTable, ids: torch.Tensor) -> None:
        for tracked in () if table.fused else table.shards:
            self._dense_optimizers.reset(tracked.weight, ids)

    def _follow(self) -> None:
        if self._unpublished:
            self._unpublished.check()
        follow_replaced(self._tables)
        self.follow_maps()

    def _mark_lookup(self, features: KeyedJaggedTensor, kernel: nn.Module, _gradient: torch.Tensor) -> None:
        with self._gate:
            self._gate.begin_updates()
            self._marks.add(features, kernel)
            if kernel in self._alone:
                self._marks.compact()

    def _pass_over(self, kernel: nn.Module, _gradient: torch.Tensor) -> None:
        with self._gate:
            self._gate.begin_updates()
            if self._verification:
                self._verification.excuse(number for number, _ in self._lookups[kernel] if number is not None)

    def _begin_rewrite(self, tables: Iterable[str]) -> None:
        with self._gate:
            self._rewrites.append(self._gate.updating)
            self._gate.begin_updates()
        self.mark_rewritten(self._fused.intersection(tables))

    def _end_rewrite(self, tables: Iterable[str]) -> None:
        self.mark_rewritten(self._fused.intersection(tables))
        # One that failed has begun and not ended; others wait for the end of the step then.
        if self._rewrites and not self._rewrites.pop():
            self._gate.end_updates()

    def _begin_updates(self, *_: object) -> None:
        if not self._gate.updating:
            with self._gate:
                self._gate.begin_updates()

    def _mark_evicted(self, name: str, module: ShardedEmbeddingModule, evicted: Mapping[str, Any]) -> None:
        # TorchRec calls it at every lookup, in evaluation too, and mostly nothing is evicted: no row changes.
        found = {table_fqn(name, module, table): ids for table, ids in evicted.items() if ids is not None}
        with self._gate:
            for fqn in self._numbers.keys() & found.keys():
                self._gate.begin_updates()
                self._stamps.stamp(self._numbers[fqn], found[fqn])

    def _number(self, table: str) -> int:
        if table not in self._numbers:
            raise NotFound(f"no table {table!r} is tracked on this rank; there are: {', '.join(self._numbers)}")
        return self._numbers[table]
