"""The ranks that measure step times, under torchrun.

Copies of the demo's model train on the same batches: one alone, one with a tracker that is read like a publishing
one and, given a service, one that publishes. They take turns, a few steps each, there and back again, so that a
change of the machine's speed meets all of them alike.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
from torchrec.distributed import TrainPipelineSparseDist

from trainer.data.batch import ClickBatch, click_batch
from trainer.data.features import FeatureOptions, Features, Featurizer
from trainer.data.stream import batches, open_stream
from trainer.model import ClickModel, ModelOptions
from trainer.ranks import join_ranks
from trainer.sharding import OptimizerOptions, shard
from trainer.sync import DeltaSync, SyncOptions
from trainer.tracking.modes import TrackingMode
from trainer.tracking.options import TrackerOptions
from trainer.tracking.tracker import Tracker

BATCH, PUBLISH_EVERY = 128, 10
# A turn has one read in it. What a pipeline loads ahead is there before its turn.
TURN, AHEAD, WARM_UP = PUBLISH_EVERY, 4, 4


class _Taken(NamedTuple):
    """What a turn took: seconds, and those in which a core was at work for this rank."""

    seconds: float
    cpu_seconds: float


class _Contestant:
    """A pipeline, and what is done after each of its steps."""

    def __init__(self, pipeline: TrainPipelineSparseDist, after_step: Callable[[], None]) -> None:
        self._pipeline, self._after_step = pipeline, after_step
        self._waiting: deque[ClickBatch] = deque()
        self._stream = iter(self._waiting.popleft, None)

    def feed(self, features: Features) -> None:
        """Have it train on these later, in a batch of its own: batches keep what is computed of them."""
        self._waiting.append(click_batch(features, dist.get_rank(), dist.get_world_size()))

    def turn(self) -> _Taken:
        """Some steps, until all ranks have done them."""
        dist.barrier()
        started = _Taken(time.perf_counter(), time.process_time())
        for _ in range(TURN):
            self._pipeline.progress(self._stream)
            self._after_step()
        dist.barrier()
        return _Taken(time.perf_counter() - started.seconds, time.process_time() - started.cpu_seconds)


@click.command()
@click.option("--service", help="Where to publish; without one, nothing is published.")
@click.option("--rounds", type=click.IntRange(1), required=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(service: str | None, rounds: int, json_file: Path) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    device = join_ranks()
    options = ModelOptions()
    off = _Contestant(_pipeline(options, device)[0], lambda: None)
    on, tracker = _tracked(options, device)
    publishing, sync = _publishing(options, device, service) if service else (None, nullcontext())
    contestants = [contestant for contestant in (off, on, publishing) if contestant]
    with sync:
        taken = _rounds(contestants, _features(options), WARM_UP + rounds)[WARM_UP:]
    if dist.get_rank() == 0:
        json_file.write_text(json.dumps(_figures(taken, tracker)))
    dist.barrier()
    dist.destroy_process_group()


def _pipeline(options: ModelOptions, device: torch.device) -> tuple[TrainPipelineSparseDist, torch.nn.Module]:
    torch.manual_seed(0)
    model, optimizer = shard(ClickModel(options, torch.device("meta")), OptimizerOptions(), device)
    return TrainPipelineSparseDist(model, optimizer, device), model


def _tracked(options: ModelOptions, device: torch.device) -> tuple[_Contestant, Tracker]:
    pipeline, model = _pipeline(options, device)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, auto_compact=True, dense=True))

    def after_step() -> None:
        tracker.step()
        if tracker.steps % PUBLISH_EVERY == 0:
            tracker.acknowledge(tracker.get_delta().token)

    return _Contestant(pipeline, after_step), tracker


def _publishing(options: ModelOptions, device: torch.device, service: str) -> tuple[_Contestant, DeltaSync]:
    pipeline, model = _pipeline(options, device)
    sync = DeltaSync(model, SyncOptions(service=service, model="bench", publish_every=PUBLISH_EVERY))
    sync.flush()
    return _Contestant(pipeline, sync.step), sync


def _features(options: ModelOptions) -> Iterator[Features]:
    sizes = FeatureOptions(users=options.users, items=options.items, cross_buckets=options.cross_buckets)
    return map(Featurizer(sizes).features, batches(open_stream("synthetic"), BATCH))


def _rounds(contestants: list[_Contestant], stream: Iterator[Features], rounds: int) -> list[list[_Taken]]:
    """What each contestant's two turns took in each round."""
    _feed(contestants, stream, AHEAD)
    taken = []
    for _ in range(rounds):
        _feed(contestants, stream, 2 * TURN)
        there = [contestant.turn() for contestant in contestants]
        back = [contestant.turn() for contestant in reversed(contestants)]
        both = zip(there, reversed(back), strict=True)
        taken.append([_Taken(*map(sum, zip(first, second, strict=True))) for first, second in both])
    return taken


def _feed(contestants: list[_Contestant], stream: Iterator[Features], steps: int) -> None:
    for _ in range(steps):
        features = next(stream)
        for contestant in contestants:
            contestant.feed(features)


def _figures(taken: list[list[_Taken]], tracker: Tracker) -> dict[str, float]:
    step = statistics.median(turns[0].seconds for turns in taken) / (2 * TURN)
    share = tracker.cost.seconds / tracker.steps / step
    found = {"off_ms": 1e3 * step, "rounds": len(taken), "tracker_share": share}
    for place, name in enumerate(("tracking", "publishing")[: len(taken[0]) - 1], 1):
        ratios = sorted(turns[place].seconds / turns[0].seconds for turns in taken)
        low, high = _interval(ratios)
        found |= {
            f"{name}_step_ratio": statistics.median(ratios),
            f"{name}_step_ratio_low": low,
            f"{name}_step_ratio_high": high,
            f"{name}_cpu_ratio": statistics.median(t[place].cpu_seconds / t[0].cpu_seconds for t in taken),
            f"{name}_ms": 1e3 * statistics.median(turns[place].seconds for turns in taken) / (2 * TURN),
        }
    return found


def _interval(ordered: list[float]) -> tuple[float, float]:
    """Where the median lies with a probability of 95 %, whatever the distribution."""
    reach = math.ceil(0.98 * math.sqrt(len(ordered)))
    below = max(0, len(ordered) // 2 - reach)
    return ordered[below], ordered[-1 - below]


if __name__ == "__main__":
    main()
