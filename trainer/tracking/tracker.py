"""The tracker: a stamp per row, marked in TorchRec's hooks.

A stamp is the tracker's clock at the time of the mark. The clock ticks at every read, so that what is marked
after a read, be it by a step or from outside between two steps, is later than the cursor the read returned.
"""

import time
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
        shards: what is tracked.
        steps: optimizer steps completed.
    """

    def __init__(self, model: nn.Module, *, dense: bool = True, replicas: bool = True) -> None:
        """Attach to a model.

        Args:
            model: a model under `DistributedModelParallel`, or any other.
            dense: track the parameters outside of embedding tables too, each as a small table.
            replicas: track what every rank holds alike; one rank is enough to publish it.

        Raises:
            Contradiction: the model has another tracker.
            InvalidInput: the model has tables whose rows cannot be tracked.
        """
        self._by_kernel: dict[nn.Module, TrackedLookup] = {}
        found = [shard for name, module in sharded_modules(model) for shard in self._register(name, module)]
        found += dense_shards(model) if dense else []
        self.shards = [shard for shard in found if replicas or not shard.replicated]
        self._stamps = [torch.zeros(s.shard.rows, dtype=torch.int64, device=s.weight.device) for s in self.shards]
        self._stamps_of = dict(zip(self.shards, self._stamps, strict=True))
        self._clock = 1  # 0 stands for "never".
        self.steps = 0
        self.cost = TrackerCost()

    def _register(self, name: str, module: Any) -> list[TrackedShard]:
        # TorchRec's `register_post_lookup_tracker_fn` hands over the ids of all tables of a sharding type at
        # once, without saying which shards they belong to: a feature of two tables, or two column shards on one
        # rank, cannot be told apart. The hook of the single lookups has the same ids together with the shards.
        tracked: list[TrackedShard] = []
        for lookup, groups in lookups_of(name, module):
            if lookup.optim_state_tracker_fn is not None:
                raise Contradiction(
                    f"module {name!r} has a tracker already: TorchRec has room for one, remove the other first"
                )
            lookup.register_optim_state_tracker_fn(self.record_lookup)
            self._by_kernel |= {group.kernel: group for group in groups}
            tracked += [shard for group in groups for shard, _ in group.shards]
        return tracked

    def record_lookup(self, features: KeyedJaggedTensor, output: torch.Tensor, kernel: nn.Module) -> None:
        """See to it that the rows of a lookup are marked when they change. Called by TorchRec after each."""
        # They change in backward, which some pipelines run a step later than the lookup: marking now, or in
        # `register_post_odist_tracker_fn`, could offer a row before its update and never again. Evaluation has
        # no backward, and marks nothing.
        group = self._by_kernel[kernel]
        if output.requires_grad and any(shard.fused for shard, _ in group.shards):
            output.register_hook(lambda _gradient: self._mark_lookup(group, features))  # type: ignore[no-untyped-call]

    def mark_all(self) -> None:
        """Stamp every row: after a load, or whenever a receiver may hold nothing."""
        for stamps in self._stamps:
            stamps.fill_(self._clock)

    def step(self) -> None:
        """Note that an optimizer step is complete. It may have changed any row that is not fused."""
        for tracked, stamps in self._stamps_of.items():
            if not tracked.fused:
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
        stamps = {_place(shard): stamps.clone() for shard, stamps in self._stamps_of.items()}
        return {"steps": self.steps, "clock": self._clock, "stamps": stamps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same rank, world size and plan.

        Raises:
            Contradiction: it was made for other shards.
        """
        ours, theirs = {_place(shard) for shard in self.shards}, set(state["stamps"])
        if ours != theirs:
            odd = ", ".join(sorted(ours ^ theirs))
            raise Contradiction(f"the checkpoint has the stamps of other shards than this rank: {odd}")
        self.steps, self._clock = state["steps"], state["clock"]
        for shard, stamps in self._stamps_of.items():
            stamps.copy_(state["stamps"][_place(shard)])

    def _mark_lookup(self, lookup: TrackedLookup, features: KeyedJaggedTensor) -> None:
        started = time.perf_counter()
        ids_by_feature = torch.split(features.values(), features.length_per_key())
        first = 0
        for shard, count in lookup.shards:
            for ids in ids_by_feature[first : first + count]:
                self._stamps_of[shard].index_fill_(0, ids.long(), self._clock)
            first += count
        self.cost.marking_seconds += time.perf_counter() - started


def _place(tracked: TrackedShard) -> str:
    shard = tracked.shard
    rows = f"{shard.row_offset}-{shard.row_offset + shard.rows}"
    return f"{shard.table.name}[{rows}, {shard.col_offset}-{shard.col_offset + shard.cols}]"
