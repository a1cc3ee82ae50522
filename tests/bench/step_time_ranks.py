"""The ranks that measure step times, under torchrun.

The demo's model trains a few steps without a tracker and a few with one that is read as for publishing. They take
turns, there and back again, so that a change of the machine's speed concerns both. It is the same model in both: a
copy lies elsewhere in memory, which changes its speed, and no number of turns would average that out.
"""

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import click
import torch
import torch.distributed as dist
from tests.bench.timing import Duration, spread_of
from torch import nn
from torchrec.distributed import TrainPipelineSparseDist

from deltasync.trainer.distributed.ranks import join_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickBatch, ClickModel, click_batch
from deltasync.trainer.example.options import ModelOptions, StreamOptions
from deltasync.trainer.example.stream import batches
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

BATCH, PUBLISH_EVERY = 128, 10
# What ratios of a `Duration` are called.
_CLOCKS = ("step", "cpu", "thread")
# A turn has one read in it. What a pipeline loads ahead is there before its turn.
TURN, AHEAD, WARM_UP = PUBLISH_EVERY, 4, 4

# Says for the length of a turn what is done after each step.
_Mode = Callable[[], AbstractContextManager[Callable[[], None]]]


class _Training:
    """A pipeline, and batches that wait for it."""

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model, optimizer = shard(
            ClickModel(options, torch.device("meta")), click_tables(), OptimizerOptions(), device
        )
        self._pipeline = TrainPipelineSparseDist(self.model, optimizer, device)
        self._waiting: deque[ClickBatch] = deque()
        self._stream = iter(self._waiting.popleft, None)
        self._batches = _batches(options)
        self._load(AHEAD)

    def turn(self, mode: _Mode) -> Duration:
        """Some steps, until all ranks have done them."""
        self._load(TURN)
        with mode() as after_step:
            dist.barrier()
            started = Duration.now()
            for _ in range(TURN):
                self._pipeline.progress(self._stream)
                after_step()
            dist.barrier()
            return Duration.since(started)

    def _load(self, batches: int) -> None:
        self._waiting.extend(islice(self._batches, batches))


class _Tracking:
    """Turns with a tracker."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.seconds, self.steps = 0.0, 0

    @contextmanager
    def turn(self) -> Iterator[Callable[[], None]]:
        """Track for the length of a turn; the tracker is read every `PUBLISH_EVERY` steps, as for publishing."""
        tracker = Tracker(self._model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))

        def after_step() -> None:
            tracker.step()
            if tracker.steps % PUBLISH_EVERY == 0:
                tracker.acknowledge(tracker.get_delta())

        yield after_step
        tracker.close()
        self.seconds += tracker.cost.seconds
        self.steps += tracker.steps


@click.command()
@click.option("--rounds", type=click.IntRange(1), required=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(rounds: int, json_file: Path) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    device = join_ranks()
    training = _Training(ModelOptions(), device)
    tracking = _Tracking(training.model)
    turns: list[Callable[[], Duration]] = [
        partial(training.turn, lambda: nullcontext(lambda: None)),
        partial(training.turn, tracking.turn),
    ]
    durations = [_round(turns) for _ in range(WARM_UP + rounds)][WARM_UP:]
    if dist.get_rank() == 0:
        json_file.write_text(json.dumps(_figures(durations, tracking)))
    dist.barrier()
    dist.destroy_process_group()


def _batches(options: ModelOptions) -> Iterator[ClickBatch]:
    featurizer = Featurizer(options)
    for events in batches(StreamOptions(batch_size=BATCH), options):
        yield click_batch(featurizer.features(events), dist.get_rank(), dist.get_world_size())


def _round(turns: list[Callable[[], Duration]]) -> list[list[Duration]]:
    """What each turn took on the way there, and on the way back."""
    there = [turn() for turn in turns]
    back = [turn() for turn in reversed(turns)]
    return [there, back[::-1]]


def _figures(rounds: list[list[list[Duration]]], tracking: _Tracking) -> dict[str, float]:
    ways = [way for both in rounds for way in both]
    step = statistics.median(way[0].seconds for way in ways) / TURN
    share = tracking.seconds / tracking.steps / step
    cpu = statistics.median(way[0].cpu_seconds for way in ways) / TURN
    found = {"off_ms": 1e3 * step, "off_cpu_ms": 1e3 * cpu, "rounds": len(rounds), "tracker_share": share}
    for clock, kind in enumerate(_CLOCKS):
        found |= spread_of(f"tracking_{kind}_ratio", (way[1][clock] / way[0][clock] for way in ways))
    return found | {"tracking_ms": 1e3 * statistics.median(way[1].seconds for way in ways) / TURN}


if __name__ == "__main__":
    main()
