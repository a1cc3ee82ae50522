"""The tracker: a stamp per row, marked in TorchRec's hooks.

A stamp is the tracker's clock at the time of the mark. The clock ticks at every read, so that what is marked
after a read, be it by a step or from outside between two steps, is later than the cursor the read returned.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sync_service.errors import Contradiction
from trainer.tracking.shards import TrackedLookup, TrackedShard, dense_shards, lookups_of, sharded_modules


@dataclass
class TrackerCost:
    """What tracking has cost the trainer's thread so far, in seconds."""

    marking_seconds: float = 0.0
    reading_seconds: float = 0.0


@dataclass(frozen=True)
class ChangedRows:
    """Changed rows of a shard: its index, local ids ([n] int64, ascending) and current values ([n, cols])."""

    shard: int
    ids: torch.Tensor
    values: torch.Tensor


class Tracker:
    """Knows when each row of this rank's shards last changed.

    Attributes:
        shards: what is tracked; dense parameters, if any, come last.
        steps: optimizer steps completed.
    """

    def __init__(self, model: nn.Module, *, dense: bool = True) -> None:
        self._by_kernel: dict[nn.Module, TrackedLookup] = {}
        self.shards: list[TrackedShard] = []
        for name, module in sharded_modules(model):
            self._register(name, module)
        self._first_dense = len(self.shards)
        if dense:
            self.shards.extend(dense_shards(model))
        self._index = {shard: number for number, shard in enumerate(self.shards)}
        self._stamps = [torch.zeros(s.shard.rows, dtype=torch.int64, device=s.weight.device) for s in self.shards]
        self._looked_up: list[tuple[TrackedLookup, KeyedJaggedTensor]] = []
        self._clock = 1  # 0 stands for "never".
        self.steps = 0
        self.cost = TrackerCost()

    def _register(self, name: str, module: Any) -> None:
        # `register_post_lookup_tracker_fn` hands over the ids of all tables of a sharding type at once, without
        # saying which shards they belong to: a feature of two tables, or two column shards on one rank, cannot
        # be told apart. The hook of the single lookups has the same ids together with the shards.
        for lookup, tracked in lookups_of(name, module):
            for each in tracked:
                self._by_kernel[each.kernel] = each
                self.shards.extend(shard for shard, _ in each.shards)
            if lookup.optim_state_tracker_fn is not None:
                raise Contradiction(
                    f"module {name!r} has a tracker already: TorchRec has room for one, remove the other first"
                )
            lookup.register_optim_state_tracker_fn(self.record_lookup)
        # Marking waits for the output dist to be under way, so that it runs while the network is busy.
        module.register_post_odist_tracker_fn(self.mark_looked_up)

    def record_lookup(self, features: KeyedJaggedTensor, _output: torch.Tensor, kernel: nn.Module) -> None:
        """Note a lookup. Called by TorchRec right after it; evaluation, which changes no row, is left out."""
        if torch.is_grad_enabled():
            self._looked_up.append((self._by_kernel[kernel], features))

    def mark_looked_up(self) -> None:
        """Stamp the rows of the noted lookups. Called by TorchRec once the output dist is under way."""
        started = time.perf_counter()
        for lookup, features in self._looked_up:
            self._mark_lookup(lookup, features)
        self._looked_up.clear()
        self.cost.marking_seconds += time.perf_counter() - started

    def mark_all(self) -> None:
        """Stamp every row: after a load, or whenever a receiver may hold nothing."""
        for stamps in self._stamps:
            stamps.fill_(self._clock)

    def step(self) -> None:
        """Note that an optimizer step is complete: what its lookups marked has changed."""
        self.mark_looked_up()
        for stamps in self._stamps[self._first_dense :]:
            stamps.fill_(self._clock)
        self.steps += 1

    def read(self, cursor: int) -> tuple[list[ChangedRows], int]:
        """The rows marked after `cursor` (0 = ever), and the cursor that says they were taken.

        To be called between steps. The values are current, and copies in host memory. Reading moves nothing:
        reading again from the same cursor gives these rows again, and those marked since.
        """
        started = time.perf_counter()
        changed = []
        with torch.no_grad():
            for number, (tracked, stamps) in enumerate(zip(self.shards, self._stamps, strict=True)):
                ids = torch.nonzero(stamps > cursor).squeeze(1)
                if len(ids):
                    values = tracked.weight.index_select(0, ids)
                    changed.append(ChangedRows(number, ids.cpu(), values.cpu()))
        taken, self._clock = self._clock, self._clock + 1
        self.cost.reading_seconds += time.perf_counter() - started
        return changed, taken

    def state_dict(self) -> dict[str, Any]:
        """Stamps, clock and step count, for a checkpoint of this rank."""
        return {"steps": self.steps, "clock": self._clock, "stamps": [stamps.clone() for stamps in self._stamps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same rank, world size and plan.

        Raises:
            Contradiction: it was made for other shards.
        """
        ours, theirs = _shapes(self._stamps), _shapes(state["stamps"])
        if ours != theirs:
            raise Contradiction(f"the checkpoint has stamps of {theirs} rows, this rank's shards have {ours}")
        self.steps, self._clock = state["steps"], state["clock"]
        for stamps, loaded in zip(self._stamps, state["stamps"], strict=True):
            stamps.copy_(loaded)

    def _mark_lookup(self, lookup: TrackedLookup, features: KeyedJaggedTensor) -> None:
        ids_by_feature = torch.split(features.values(), features.length_per_key())
        first = 0
        for shard, count in lookup.shards:
            for ids in ids_by_feature[first : first + count]:
                self._stamps[self._index[shard]].index_fill_(0, ids.long(), self._clock)
            first += count


def _shapes(stamps: Iterable[torch.Tensor]) -> list[int]:
    return [len(each) for each in stamps]
