"""The rank of the tracker benchmark, under torchrun: the cost of recording and reading.

Both trackers watch the same model train on the same batches: one table, looked up row by row, with ids as skewed
as clicks of people. Only the time within their own functions counts.
"""

import json
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode as TheirMode
from torchrec.distributed.model_tracker.types import UniqueRows
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.distributed.ranks import join_ranks
from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.row_marking import RowMarking
from deltasync.trainer.tracking.torchrec_hooks import Listeners
from deltasync.trainer.tracking.tracked_model import TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracker import Tracker

DIM, IDS_PER_SAMPLE = 64, 50


_FQN = "sparse.embeddings.table"
MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)
ROWS, IDS, STEPS_PER_READ = 10_000_000, 200_000, 20
# The exponents that fit MovieTweetings best: 0.89 for how often films are rated, 0.70 for how often users rate.
SKEWS = {0.9: 5, 0.7: 3}
"""Windows to measure, by skew."""


class RowModel(nn.Module):
    """An `EmbeddingCollection` of one table, and a linear layer over each row looked up."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        meta = torch.device("meta")
        table = EmbeddingConfig(name="table", num_embeddings=rows, embedding_dim=DIM, feature_names=["ids"])
        self.sparse = EmbeddingCollection(tables=[table], device=meta)
        self.dense = nn.Linear(DIM, 1, device=meta)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.dense(self.sparse(sparse)["ids"].values()).pow(2).mean()
        return loss


class Training:
    """Real training steps of a sharded `RowModel`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        model = RowModel(rows)
        sharder = EmbeddingCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        )
        plan = construct_module_sharding_plan(
            model.sparse,
            {"table": table_wise(rank=0, compute_kernel="fused")},
            sharder,
            local_size=1,
            world_size=1,
            device_type=device.type,
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=ShardingPlan(plan={"sparse": plan}),
            sharders=[sharder],
        )
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        self._optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def step(self, batch: KeyedJaggedTensor) -> None:
        self._optimizer.zero_grad()
        self.model(batch).backward()
        self._optimizer.step()


def batches(rows: int, ids: int, skew: float, device: torch.device) -> Iterator[KeyedJaggedTensor]:
    """Batches without end of `ids` ids of a table of `rows` rows.

    The r-th most popular row is drawn with a probability of about r^-skew; its place is left to chance.
    """
    generator = torch.Generator().manual_seed(0)
    by_popularity = torch.randperm(rows, generator=generator)
    lengths = torch.full((ids // IDS_PER_SAMPLE,), IDS_PER_SAMPLE)
    while True:
        uniform = torch.rand(ids, generator=generator, dtype=torch.float64)
        values = by_popularity[_ranks(uniform, rows, skew)]
        yield KeyedJaggedTensor(keys=["ids"], values=values, lengths=lengths).to(device)


def _ranks(uniform: torch.Tensor, rows: int, skew: float) -> torch.Tensor:
    """Ranks from 0 by the inverse of the integral of (rank + 1)^-skew, whose sum has none in closed form."""
    flat = 1.0 - skew
    drawn = (((rows + 1) ** flat - 1) * uniform + 1) ** (1 / flat)
    ranks: torch.Tensor = (drawn.long() - 1).clamp_(0, rows - 1)
    return ranks


class Stopwatch:
    """Adds up seconds, those of a GPU too."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def running(self) -> Iterator[None]:
        self._synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds += time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class TorchRecTracker(ModelDeltaTrackerTrec):  # type: ignore[misc]  # torchrec's types are not followed
    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self._watch = Stopwatch(training.device)
        # TorchRec has room for one tracker at a time: the others are put back beside this one.
        place = training.model.module.sparse
        others, place.post_lookup_tracker_fn = place.post_lookup_tracker_fn, None
        super().__init__(training.model, consumers=consumers, mode=TheirMode(mode.value))
        if others:
            Listeners.at(place, "post_lookup_tracker_fn").functions.append(others)

    def record_lookup(self, *arguments: Any) -> None:
        with self._watch.running():
            super().record_lookup(*arguments)

    def begin_step(self) -> None:
        """Called by `DistributedModelParallel` before each forward."""
        with self._watch.running():
            self.step()

    def read(self, consumer: str) -> UniqueRows:
        """The changed rows, which it does not offer again."""
        with self._watch.running():
            return self.get_unique(consumer)[_FQN]

    @property
    def seconds(self) -> float:
        return self._watch.seconds


class WatchedTracker(Tracker):
    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self._watch = Stopwatch(training.device)
        record = RowMarking.record_lookup

        def timed(marking: RowMarking, *arguments: Any) -> None:
            with self._watch.running():
                record(marking, *arguments)

        with mock.patch.object(RowMarking, "record_lookup", timed):
            super().__init__(training.model, TrackerOptions(mode=mode, consumers=consumers))

    def end_step(self) -> None:
        """Called by a trainer after each step."""
        with self._watch.running():
            self.step()

    def read(self, consumer: str) -> Delta:
        """The changed rows, acknowledged at once."""
        with self._watch.running():
            delta = self.get_delta(consumer)
            self.acknowledge(delta)
        return delta

    @property
    def seconds(self) -> float:
        """Seconds spent in the tracker so far. It measures its own work in backward."""
        return self._watch.seconds + self.cost.marking_seconds


class TrackerPair:
    """Both trackers, in the same mode on the same model."""

    def __init__(self, training: Training, mode: TrackingMode, consumers: list[str]) -> None:
        self.mode = mode
        self.theirs = TorchRecTracker(training, mode, consumers)
        self.ours = WatchedTracker(training, mode, consumers)

    def read(self, consumer: str, *, ours_first: bool = True) -> int:
        """Read both; the number of rows."""
        if ours_first:
            ours, theirs = self.ours.read(consumer), self.theirs.read(consumer)
        else:
            theirs, ours = self.theirs.read(consumer), self.ours.read(consumer)
        order = theirs.ids.argsort()
        ids = torch.from_numpy(ours.ids[_FQN])
        same = torch.equal(theirs.ids[order].cpu(), ids)
        for first in ours.first.values():
            same = same and torch.equal(theirs.states[order].cpu(), torch.from_numpy(first))
        if not same:
            raise RuntimeError(f"mode {self.mode.value!r}: the trackers differ")
        return len(ids)


@dataclass(frozen=True)
class Window:
    """Some steps and a read."""

    mode: str
    skew: float
    rows: int
    ours_seconds: float
    theirs_seconds: float


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(json_file: Path) -> None:
    """Measure, and write the figures."""
    logging.basicConfig(level=logging.WARNING)
    device = join_ranks()
    windows = list(_windows(device))
    figures = {
        "rows": ROWS,
        "dim": DIM,
        "ids_per_step": IDS,
        "steps_per_read": STEPS_PER_READ,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "recording": [_summary(windows, mode, skew) for skew in SKEWS for mode in MODES],
        "windows": [asdict(window) for window in windows],
    }
    json_file.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _windows(device: torch.device) -> Iterator[Window]:
    training = Training(ROWS, device)
    pairs = [TrackerPair(training, mode, ["reader"]) for mode in MODES]
    for skew, count in SKEWS.items():
        stream = batches(ROWS, IDS, skew, device)
        for number in range(count + 1):
            windows = _window(training, pairs, list(islice(stream, STEPS_PER_READ)), skew, number)
            if number:  # The first meets pages that were never touched.
                yield from windows


def _window(
    training: Training, pairs: list[TrackerPair], some: list[KeyedJaggedTensor], skew: float, number: int
) -> list[Window]:
    before = [(pair.ours.seconds, pair.theirs.seconds) for pair in pairs]
    for batch in some:
        _step(training, pairs, batch)
    windows = []
    for pair, (ours, theirs) in zip(pairs, before, strict=True):
        rows = pair.read("reader", ours_first=number % 2 == 0)
        seconds = pair.ours.seconds - ours, pair.theirs.seconds - theirs
        windows.append(Window(pair.mode.value, skew, rows, *seconds))
    return windows


def _step(training: Training, pairs: list[TrackerPair], batch: KeyedJaggedTensor) -> None:
    for pair in pairs:
        pair.theirs.begin_step()
    training.step(batch)
    for pair in pairs:
        pair.ours.end_step()


def _summary(windows: list[Window], mode: TrackingMode, skew: float) -> dict[str, Any]:
    mine = [window for window in windows if (window.mode, window.skew) == (mode.value, skew)]
    return {
        "mode": mode.value,
        "skew": skew,
        "windows": len(mine),
        "rows_read": statistics.median(window.rows for window in mine),
        "ours_seconds": statistics.median(window.ours_seconds for window in mine),
        "theirs_seconds": statistics.median(window.theirs_seconds for window in mine),
        "time_ratio": statistics.median(window.ours_seconds / window.theirs_seconds for window in mine),
    }


if __name__ == "__main__":
    main()
