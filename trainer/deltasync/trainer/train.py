"""Online training under torchrun, publishing as it goes:

torchrun --nproc-per-node 2 -m deltasync.trainer.train --service localhost:50051 --model clicks
"""

from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.core.process import log_to_stderr
from deltasync.trainer.clicks.checkpoint import load_checkpoint, save_checkpoint
from deltasync.trainer.clicks.micro_batches import TimedBatches, micro_batches
from deltasync.trainer.clicks.model import MODELS
from deltasync.trainer.clicks.results import Results
from deltasync.trainer.clicks.stream_options import managed_option, stream_options, take_stream_options
from deltasync.trainer.clicks.training_options import take_training_options, training_options, why_not_shared
from deltasync.trainer.distributed.ranks import join_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking.row_reset import evict_on_cpu


@click.command(context_settings=CONTEXT)
@stream_options
@managed_option
@training_options
@service_options(default=None)
@click.option("--model", default="clicks", help="Name of the set of tables.")
@click.option("--publish-every", type=click.IntRange(1), default=10, help="Steps between cuts.")
@click.option("--table-lr", default=OptimizerOptions.table_lr, help="Learning rate of the tables.")
@click.option("--dense-lr", default=OptimizerOptions.dense_lr, help="Learning rate of everything else.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder to go on from, and to save to.")
@click.option("--results", type=click.Path(path_type=Path), help="Folder for scores and tables, for comparison.")
def main(checkpoint: Path | None, results: Path | None, table_lr: float, dense_lr: float, **settings: Any) -> None:
    """Train the click model on a stream of events, and publish the rows that change."""
    log_to_stderr()
    stream, training = take_stream_options(settings), take_training_options(settings)
    device = join_ranks()
    if reason := why_not_shared(stream.batch_size, dist.get_world_size(), training):
        raise click.UsageError(reason)
    torch.manual_seed(stream.seed)
    learning = OptimizerOptions(table_lr=table_lr, dense_lr=dense_lr)
    click_model = MODELS[training.input](stream.model, torch.device("meta"))
    model, optimizer = shard(click_model, click_tables(stream.model.managed_tables), learning, device)
    evict_on_cpu(model)
    pipeline = OnlinePipeline(model, optimizer, device, training.pipeline)
    sync, scored = DeltaSync(model, SyncOptions(**settings)), Results(model) if results else None
    if checkpoint:
        load_checkpoint(checkpoint, model, optimizer, sync)
    with sync:
        sync.flush()  # So that replicas hold the model before its first step.
        mine = TimedBatches(micro_batches(stream, training, sync.tracker.steps))
        _train(pipeline, mine, sync, scored)
    if checkpoint:
        save_checkpoint(checkpoint, model, optimizer, sync)
    if results and scored:
        pipeline.detach()
        scored.write(results, dist.get_rank(), sync, mine.last)
    dist.destroy_process_group()


def _train(pipeline: OnlinePipeline, mine: TimedBatches, sync: DeltaSync, scored: Results | None) -> None:
    while True:
        try:
            output = pipeline.progress(mine)
        except StopIteration:
            return
        if scored:
            scored.add(output, step_ended=pipeline.stepped)
        event_time_unix_ns = mine.trained()
        if pipeline.stepped:
            sync.step(event_time_unix_ns)


if __name__ == "__main__":
    main()
