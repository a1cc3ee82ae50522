"""Online training under torchrun, publishing as it goes:

torchrun --nproc-per-node 2 -m deltasync.trainer.train --service localhost:50051 --model clicks
"""

import os

import click
import torch
import torch.distributed as dist

from deltasync.cli.config import CONTEXT
from deltasync.core.logs import log_to_stderr
from deltasync.trainer.clicks.checkpoints import Checkpoints
from deltasync.trainer.clicks.micro_batches import TimedBatches, micro_batches
from deltasync.trainer.clicks.model import MODELS
from deltasync.trainer.clicks.results import Results
from deltasync.trainer.clicks.run_options import RunOptions, run_options
from deltasync.trainer.clicks.training import Training
from deltasync.trainer.clicks.training_options import why_not_shared
from deltasync.trainer.distributed.ranks import join_ranks, leave_ranks
from deltasync.trainer.distributed.sharding import click_tables, shard
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.prometheus import serve_metrics
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.tracking.row_reset import evict_on_cpu


def _train(run: RunOptions, device: torch.device) -> None:
    """Train on a whole stream; nothing of the model is left after it."""
    stream, training, publishing, outputs = run.stream, run.training, run.publishing, run.outputs
    torch.manual_seed(stream.seed)
    click_model = MODELS[training.input](stream.model, torch.device("meta"))
    model, optimizer = shard(click_model, click_tables(stream.model.managed_tables), run.learning, device)
    evict_on_cpu(model)
    pipeline = OnlinePipeline(model, optimizer, device, training.pipeline)
    sync, scored = DeltaSync(model, publishing), Results(model) if outputs.results else None
    folder, every = outputs.checkpoint, outputs.checkpoint_every
    checkpoints = Checkpoints(folder, every, model, optimizer, sync) if folder else None
    if checkpoints:
        checkpoints.load()
    mine, rank = TimedBatches(micro_batches(stream, training, sync.tracker.steps)), dist.get_rank()
    with sync, outputs.scalars(sync, rank, publishing.service) as scalars:
        if outputs.metrics:
            serve_metrics(sync, publishing.model, rank, outputs.metrics, int(os.environ.get("LOCAL_RANK", 0)))
        Training(pipeline, sync, publishing.on_refusal, scored, checkpoints, scalars).run(mine)
    if outputs.results and scored:
        pipeline.detach()
        scored.write(outputs.results, rank, sync, mine.last)


@click.command(context_settings=CONTEXT)
@run_options
def main(run: RunOptions) -> None:
    """Train the click model on a stream of events, and publish the rows that change."""
    log_to_stderr()
    device = join_ranks()
    if reason := why_not_shared(run.stream.batch_size, dist.get_world_size(), run.training):
        raise click.UsageError(reason)
    _train(run, device)
    leave_ranks()


if __name__ == "__main__":
    main()
