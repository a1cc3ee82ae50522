"""The ranks of the tracking benchmark, under torchrun.

Three copies of the model train on the same batches in turn, a few steps each, so that a change of the
machine's speed meets all of them: one alone, one with a tracker that is read like a publishing one, and one
that publishes.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torchrec.distributed import TrainPipelineSparseDist

from trainer.data.batch import ClickBatch, click_batch
from trainer.data.features import FeatureOptions, Featurizer
from trainer.data.stream import batches, open_stream
from trainer.model import ClickModel, ModelOptions
from trainer.ranks import join_ranks
from trainer.sharding import OptimizerOptions, shard
from trainer.sync import DeltaSync, SyncOptions
from trainer.tracking.modes import TrackingMode
from trainer.tracking.options import TrackerOptions
from trainer.tracking.tracker import Tracker

BATCH, PUBLISH_EVERY = 128, 10
STEPS, WARM_UP, ROUNDS = 40, 2, 15


@dataclass
class _Contestant:
    """A pipeline, and what is done after each of its steps."""

    pipeline: TrainPipelineSparseDist
    after_step: Callable[[], None]

    def seconds(self, events: list[ClickBatch]) -> float:
        """Mean seconds of a step over some batches."""
        stream = iter(events)
        dist.barrier()
        started = time.perf_counter()
        for _ in events:
            self.pipeline.progress(stream)
            self.after_step()
        return (time.perf_counter() - started) / len(events)


@click.command()
@click.option("--service", required=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(service: str, json_file: Path) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    device = join_ranks()
    options = ModelOptions()
    off = _Contestant(_pipeline(options, device)[0], lambda: None)
    on, tracker = _tracked(options, device)
    pipeline, model = _pipeline(options, device)
    sync = DeltaSync(model, SyncOptions(service=service, model="bench", publish_every=PUBLISH_EVERY))
    with sync:
        sync.flush()
        contestants = [off, on, _Contestant(pipeline, sync.step)]
        stream = _batches(options)
        rounds = [_round(contestants, stream) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    if dist.get_rank() == 0:
        json_file.write_text(json.dumps(_figures(rounds, tracker)))
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


def _batches(options: ModelOptions) -> Iterator[ClickBatch]:
    featurizer = Featurizer(
        FeatureOptions(users=options.users, items=options.items, cross_buckets=options.cross_buckets)
    )
    for events in batches(open_stream("synthetic"), BATCH):
        yield click_batch(featurizer.features(events), dist.get_rank(), dist.get_world_size())


def _round(contestants: list[_Contestant], stream: Iterator[ClickBatch]) -> list[float]:
    events = [next(stream) for _ in range(STEPS)]
    return [contestant.seconds(events) for contestant in contestants]


def _figures(rounds: list[list[float]], tracker: Tracker) -> dict[str, float]:
    off, on, publishing = zip(*rounds, strict=True)
    return {
        "tracking_step_ratio": statistics.median(b / a for a, b, _ in rounds),
        "publishing_step_ratio": statistics.median(c / a for a, _, c in rounds),
        "tracker_share": tracker.cost.seconds / tracker.steps / statistics.median(off),
        "off_ms": 1e3 * statistics.median(off),
        "tracking_ms": 1e3 * statistics.median(on),
        "publishing_ms": 1e3 * statistics.median(publishing),
        "rounds": len(rounds),
    }


if __name__ == "__main__":
    main()
