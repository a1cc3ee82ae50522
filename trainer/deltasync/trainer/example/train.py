"""5. One rank of a trainer that trains online under torchrun, and publishes the rows that change:

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
from deltasync.client import DeltasyncError, Endpoint
from deltasync.trainer.checkpoints import TrainerCheckpoints
from deltasync.trainer.distributed.ranks import join_ranks, leave_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickBatch, ClickModel, click_batch
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.results import write_arrays, write_shards
from deltasync.trainer.example.stream import play
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.prometheus import serve_metrics
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking.shards import evict_on_cpu

logger = logging.getLogger(__name__)

# A service that does not answer delays the first step by at most this.
_PATIENCE_SECONDS = 60.0
_FOLDER = click.Path(path_type=Path)


def rank_batches(
    stream: StreamOptions, sizes: ModelOptions, past: int, event_times: deque[int], poison_at: int | None = None
) -> Iterator[ClickBatch]:
    """Yield this rank's batches after the first `past` steps.

    Appends the arrival of each batch's newest event to `event_times`, in nanoseconds since 1970, because the
    pipeline loads batches ahead. From event `poison_at` on, labels are flipped; features still use the right ones.
    """
    featurizer, rank, ranks = Featurizer(sizes), dist.get_rank(), dist.get_world_size()
    for step, (events, arrival) in enumerate(play(stream, sizes, past)):
        features = featurizer.features(events)  # Events of past steps count for the features of later ones.
        if poison_at is not None:
            flipped = np.where(features.index < poison_at, features.label, 1 - features.label)
            features = replace(features, label=flipped)
        if step >= past and len(events) >= ranks:
            event_times.append(round(arrival * 1e9))
            yield click_batch(features, rank, ranks)


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream")
@flags(ModelOptions, "sizes")
@service_options(default=None)
@click.option("--model", default="clicks", help="Name of the model in the service.")
@click.option("--publish-every", type=click.IntRange(1), default=10, help="Steps between cuts.")
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
    service: Endpoint,
    model: str,
    publish_every: int,
    checkpoint: Path | None,
    checkpoint_every: int,
    metrics: str | None,
    results: Path | None,
    poison_at: int | None,
) -> None:
    """Train on the whole stream. The arguments are the command's options."""
    rank = dist.get_rank()
    stream.check_ranks(dist.get_world_size())
    torch.manual_seed(0)  # All ranks draw the same initial weights.
    click_model = ClickModel(sizes, torch.device("meta"))
    sharded, optimizer = shard(click_model, click_tables(sizes.managed_tables), OptimizerOptions(), device)
    evict_on_cpu(sharded)
    pipeline = OnlinePipeline(sharded, optimizer, device)
    sync = DeltaSync(sharded, SyncOptions(service=service, model=model, publish_every=publish_every))
    checkpoints = (
        TrainerCheckpoints(checkpoint, checkpoint_every, sharded, optimizer, sync) if checkpoint else None
    )
    if checkpoints:
        checkpoints.load()
    event_times, scores = deque[int](), list[tuple[torch.Tensor, ...]]()
    batches = rank_batches(stream, sizes, sync.tracker.steps, event_times, poison_at)
    with sync:
        if metrics:
            serve_metrics(sync, model, rank, metrics, int(os.environ.get("LOCAL_RANK", 0)))
        try:
            sync.flush(_PATIENCE_SECONDS)  # Replicas can serve the model before its first step.
        except DeltasyncError as error:
            logger.warning("training begins without a published model: %s", error)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
            sync.step(event_times.popleft())
            if results:
                scores.append(output)
            if checkpoints:
                checkpoints.step()
        try:
            sync.flush()
        finally:
            if checkpoints:
                checkpoints.finish()
    if results:
        index, logit, label = (torch.cat(column).cpu().numpy() for column in zip(*scores, strict=True))
        write_arrays(results, f"scores-trainer-{rank}", {"index": index, "logit": logit, "label": label})
        write_shards(results, rank, sync)


if __name__ == "__main__":
    main()
