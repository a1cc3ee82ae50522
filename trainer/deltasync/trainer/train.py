"""Online training under torchrun, publishing as it goes:

torchrun --nproc-per-node 2 -m deltasync.trainer.train --service localhost:50051 --model clicks
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.core.logs import log_to_stderr
from deltasync.trainer.clicks.checkpoints import Checkpoints
from deltasync.trainer.clicks.micro_batches import TimedBatches, micro_batches
from deltasync.trainer.clicks.model import MODELS
from deltasync.trainer.clicks.results import Results
from deltasync.trainer.clicks.stream_options import (
    StreamOptions,
    managed_option,
    stream_options,
    take_stream_options,
)
from deltasync.trainer.clicks.training import Training
from deltasync.trainer.clicks.training_options import (
    TrainingOptions,
    take_training_options,
    training_options,
    why_not_shared,
)
from deltasync.trainer.distributed.ranks import join_ranks, leave_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.prometheus import serve_metrics
from deltasync.trainer.scalars import ScalarOptions, Scalars, TensorBoard
from deltasync.trainer.sync import DeltaSync, OnRefusal, SyncOptions
from deltasync.trainer.tracking.row_reset import evict_on_cpu


@dataclass(frozen=True)
class Outputs:
    """What a run leaves behind and shows beside what it publishes: the options of the same names."""

    checkpoint: Path | None
    checkpoint_every: int
    results: Path | None
    tensorboard: Path | None
    tensorboard_every: int
    metrics: str | None


def _train(
    stream: StreamOptions,
    training: TrainingOptions,
    learning: OptimizerOptions,
    options: SyncOptions,
    outputs: Outputs,
    device: torch.device,
) -> None:
    """Train on a whole stream; nothing of the model is left after it."""
    torch.manual_seed(stream.seed)
    click_model = MODELS[training.input](stream.model, torch.device("meta"))
    model, optimizer = shard(click_model, click_tables(stream.model.managed_tables), learning, device)
    evict_on_cpu(model)
    pipeline = OnlinePipeline(model, optimizer, device, training.pipeline)
    sync, scored = DeltaSync(model, options), Results(model) if outputs.results else None
    folder, every = outputs.checkpoint, outputs.checkpoint_every
    checkpoints = Checkpoints(folder, every, model, optimizer, sync) if folder else None
    if checkpoints:
        checkpoints.load()
    mine = TimedBatches(micro_batches(stream, training, sync.tracker.steps))
    with sync, _scalars(sync, options.model, outputs) as scalars:
        Training(pipeline, sync, options.on_refusal, scored, checkpoints, scalars).run(mine)
    if outputs.results and scored:
        pipeline.detach()
        scored.write(outputs.results, dist.get_rank(), sync, mine.last)


def _scalars(sync: DeltaSync, model: str, outputs: Outputs) -> Scalars:
    """What tells how training goes, while it does."""
    rank, folder = dist.get_rank(), outputs.tensorboard
    if outputs.metrics:
        serve_metrics(sync, model, rank, outputs.metrics, int(os.environ.get("LOCAL_RANK", 0)))
    callbacks = [TensorBoard(folder / f"rank-{rank}")] if folder else []
    return Scalars(sync, callbacks, ScalarOptions(every=outputs.tensorboard_every))


@click.command(context_settings=CONTEXT)
@stream_options
@managed_option
@training_options
@service_options(default=None)
@click.option("--model", default="clicks", help="Name of the set of tables.")
@click.option("--publish-every", type=click.IntRange(1), default=10, help="Steps between cuts.")
@click.option("--table-lr", default=OptimizerOptions.table_lr, help="Learning rate of the tables.")
@click.option("--dense-lr", default=OptimizerOptions.dense_lr, help="Learning rate of everything else.")
@click.option(
    "--on-refusal",
    type=click.Choice([each.value for each in OnRefusal]),
    default="continue",
    callback=lambda _ctx, _param, value: OnRefusal(value),
    help="What a step does that cannot publish.",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder to go on from, and to save to.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=1000, help="Steps between checkpoints.")
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path),
    help="Folder for TensorBoard's scalars, one in it for each rank.",
)
@click.option(
    "--tensorboard-every", type=click.IntRange(1), default=ScalarOptions.every, help="Steps between them."
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Where the first rank here answers /metrics; others take the next ports.",
)
@click.option("--results", type=click.Path(path_type=Path), help="Folder for scores and tables, for comparison.")
def main(
    checkpoint: Path | None,
    checkpoint_every: int,
    results: Path | None,
    tensorboard: Path | None,
    tensorboard_every: int,
    metrics: str | None,
    table_lr: float,
    dense_lr: float,
    **settings: Any,
) -> None:
    """Train the click model on a stream of events, and publish the rows that change."""
    log_to_stderr()
    stream, training = take_stream_options(settings), take_training_options(settings)
    device = join_ranks()
    if reason := why_not_shared(stream.batch_size, dist.get_world_size(), training):
        raise click.UsageError(reason)
    learning = OptimizerOptions(table_lr=table_lr, dense_lr=dense_lr)
    outputs = Outputs(checkpoint, checkpoint_every, results, tensorboard, tensorboard_every, metrics)
    _train(stream, training, learning, SyncOptions(**settings), outputs, device)
    leave_ranks()


if __name__ == "__main__":
    main()
