"""Online training under torchrun, which publishes changed rows:

torchrun --nproc-per-node 2 -m deltasync.trainer.example.train --service localhost:50051 --model clicks
"""

import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import DeltasyncError, Endpoint, ServiceUnavailable
from deltasync.trainer.checkpoints import TrainerCheckpoints
from deltasync.trainer.distributed.ranks import join_ranks, leave_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.compare import TrainerResults
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickModel, TensorDictClickModel, as_tensordict, click_batch
from deltasync.trainer.example.options import ModelOptions, StreamOptions, TrainingOptions, flags
from deltasync.trainer.example.stream import play
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.prometheus import serve_metrics
from deltasync.trainer.sync import DeltaSync, OnRefusal, SyncOptions
from deltasync.trainer.tracking.row_reset import evict_on_cpu

logger = logging.getLogger(__name__)

# A service that does not answer delays the first step and the last checkpoint by at most this.
_PATIENCE_SECONDS = 60.0
_FOLDER = click.Path(path_type=Path)


class TimedBatches(Iterator[Any]):
    """Batches for a pipeline that loads some ahead, with the time of the newest event that it has trained on.

    Attributes:
        last: the last batch that the pipeline has loaded.
    """

    def __init__(self, batches: Iterator[tuple[Any, int]]) -> None:
        self._batches, self._in_flight, self.last = batches, deque[int](), None

    def __next__(self) -> Any:
        self.last, event_time_unix_ns = next(self._batches)
        self._in_flight.append(event_time_unix_ns)
        return self.last

    def trained(self) -> int:
        """Record that the oldest batch in flight was trained on; returns the time of its newest event."""
        return self._in_flight.popleft()


def micro_batches(
    stream: StreamOptions, sizes: ModelOptions, training: TrainingOptions, past: int, poison_at: int | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield this rank's micro-batches after the first `past` steps, each with the time of its newest event.

    That is the time when this play of the stream delivers the event, in nanoseconds since 1970. From event
    `poison_at` on, labels are flipped; features still come from the right ones.
    """
    featurizer, rank, ranks = Featurizer(sizes), dist.get_rank(), dist.get_world_size()
    size = stream.batch_size // training.grad_accum
    for step, (events, arrival) in enumerate(play(stream, sizes, past)):
        for first in range(0, len(events), size):
            part = events[first : first + size]
            features = featurizer.features(part)  # Events of past steps count for the features of later ones.
            if poison_at is not None:
                flipped = np.where(features.index < poison_at, features.label, 1 - features.label)
                features = replace(features, label=flipped)
            if step >= past and len(part) >= ranks:
                batch = click_batch(features, rank, ranks)
                seconds = arrival - int(events.index[-1] - part.index[-1]) / stream.events_per_second
                yield as_tensordict(batch) if training.input == "tensordict" else batch, round(seconds * 1e9)


def publish_first(sync: DeltaSync, on_refusal: OnRefusal) -> None:
    """Publish the model before its first step, so that replicas can serve it."""
    if on_refusal is OnRefusal.RAISE:
        sync.flush()
        return
    try:
        sync.flush(_PATIENCE_SECONDS)
    except DeltasyncError as error:
        logger.warning("training begins without a published model: %s", error)


def finish(sync: DeltaSync, checkpoints: TrainerCheckpoints | None) -> None:
    """Publish all changes, and write the last checkpoint.

    If the service does not answer, save a checkpoint before waiting for it. If it refuses the changes, the
    checkpoint still has them.
    """
    if checkpoints is None:
        sync.flush()
        return
    try:
        try:
            sync.flush(_PATIENCE_SECONDS)
        except ServiceUnavailable as error:
            logger.warning("a checkpoint is saved before the end is published: %s", error)
            checkpoints.save()
        sync.flush()
    except DeltasyncError:
        checkpoints.finish()
        raise
    checkpoints.finish()


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@flags(TrainingOptions, "training")
@service_options(default=None)
@click.option("--model", default="clicks", help="Name of the model in the service.")
@click.option("--publish-every", type=click.IntRange(1), default=10, help="Steps between cuts.")
@click.option(
    "--on-refusal",
    type=click.Choice([each.value for each in OnRefusal]),
    default=OnRefusal.CONTINUE.value,
    help="What training does if a step cannot publish.",
)
@click.option("--checkpoint", type=_FOLDER, help="Folder of checkpoints to continue from and save to.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=1000, help="Steps between checkpoints.")
@click.option(
    "--metrics", metavar="HOST:PORT", help="Serve /metrics: first rank on this port, others on the next ports."
)
@click.option("--results", type=_FOLDER, help="Folder for scores and tables, for the demo's comparison.")
@click.option("--poison-at", type=int, help="From this event on, train on flipped labels, for the demo.")
def main(**settings: Any) -> None:
    """Train the click model on a stream of events, and publish the rows that change."""
    log_to_stderr()
    train(join_ranks(), **settings)
    leave_ranks()  # The model is gone, so nothing uses the process group any more.


def train(
    device: torch.device,
    *,
    stream: StreamOptions,
    sizes: ModelOptions,
    training: TrainingOptions,
    service: Endpoint,
    model: str,
    publish_every: int,
    on_refusal: str,
    checkpoint: Path | None,
    checkpoint_every: int,
    metrics: str | None,
    results: Path | None,
    poison_at: int | None,
) -> None:
    """Train on the whole stream. The arguments are the command's options."""
    rank = dist.get_rank()
    training.check_shares(stream.batch_size, dist.get_world_size())
    # Draw the same initial weights on all ranks.
    torch.manual_seed(0)
    model_class = TensorDictClickModel if training.input == "tensordict" else ClickModel
    click_model = model_class(sizes, torch.device("meta"))
    sharded, optimizer = shard(click_model, click_tables(sizes.managed_tables), OptimizerOptions(), device)
    evict_on_cpu(sharded)
    pipeline = OnlinePipeline(sharded, optimizer, device, training.pipeline)
    refusal = OnRefusal(on_refusal)
    options = SyncOptions(service=service, model=model, publish_every=publish_every, on_refusal=refusal)
    sync, scored = DeltaSync(sharded, options), TrainerResults(sharded) if results else None
    checkpoints = (
        TrainerCheckpoints(checkpoint, checkpoint_every, sharded, optimizer, sync) if checkpoint else None
    )
    if checkpoints:
        checkpoints.load()
    batches = TimedBatches(micro_batches(stream, sizes, training, sync.tracker.steps, poison_at))
    with sync:
        if metrics:
            serve_metrics(sync, model, rank, metrics, int(os.environ.get("LOCAL_RANK", 0)))
        publish_first(sync, refusal)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
            event_time_unix_ns = batches.trained()
            if scored:
                scored.add(output, stepped=pipeline.stepped)
            if not pipeline.stepped:  # This step has more micro-batches.
                continue
            sync.step(event_time_unix_ns)
            if checkpoints:
                checkpoints.step()
        finish(sync, checkpoints)
    if results and scored:
        pipeline.detach()
        scored.write(results, rank, sync, batches.last)


if __name__ == "__main__":
    main()
