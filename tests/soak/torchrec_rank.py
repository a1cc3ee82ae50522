"""One rank of a TorchRec trainer, which saves checkpoints as it goes, and begins with the newest there is.

python -m tests.soak.torchrec_rank --service localhost:50051 --rank 0 --ranks 1 --port 4242 --folder ..
"""

import os
from collections import deque
from pathlib import Path

import click
import torch
import torch.distributed as dist
from tests.soak.fleet import CLICKS
from tests.soak.rank import stop_file
from tests.soak.stores import CLICK_MODEL

from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Endpoint
from deltasync.trainer.checkpoints import TrainerCheckpoints
from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.distributed.ranks import join_ranks, leave_ranks
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.model import ClickModel
from deltasync.trainer.example.options import StreamOptions
from deltasync.trainer.example.results import write_shards
from deltasync.trainer.example.train import rank_batches
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.sync import DeltaSync, SyncOptions

_STREAM = StreamOptions(events=1_000_000, events_per_second=160.0, batch_size=32)
_CHECKPOINT_EVERY = 20


def _train(pipeline: OnlinePipeline, sync: DeltaSync, checkpoints: TrainerCheckpoints, stop: Path) -> None:
    event_times = deque[int]()
    batches = rank_batches(_STREAM, CLICK_MODEL, sync.tracker.steps, event_times)
    while on_any_rank([stop.exists()], "the next step") == [False]:
        pipeline.progress(batches)
        sync.step(event_times.popleft())
        checkpoints.step()
    checkpoints.finish()


def _join(rank: int, ranks: int, port: int) -> torch.device:
    """Join the others, as under torchrun."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return join_ranks()


def _run(service: Endpoint, folder: Path, device: torch.device) -> None:
    """Train until there is a stop file; nothing of the model is left after it."""
    torch.manual_seed(0)
    click_model = ClickModel(CLICK_MODEL, torch.device("meta"))
    model, optimizer = shard(click_model, click_tables(), OptimizerOptions(), device)
    pipeline = OnlinePipeline(model, optimizer, device)
    sync = DeltaSync(model, SyncOptions(service=service, model=CLICKS, publish_every=1))
    checkpoints = TrainerCheckpoints(folder / CLICKS, _CHECKPOINT_EVERY, model, optimizer, sync)
    checkpoints.load()
    with sync:
        sync.flush()
        _train(pipeline, sync, checkpoints, stop_file(folder, CLICKS))
    pipeline.detach()
    write_shards(folder, dist.get_rank(), sync)


@click.command(context_settings=CONTEXT)
@service_options(default=None)
@click.option("--rank", type=int, required=True, help="Number of the rank.")
@click.option("--ranks", type=int, required=True, help="How many there are.")
@click.option("--port", type=int, required=True, help="Where the first rank listens for the others.")
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="Folder of checkpoints and results."
)
def main(service: Endpoint, rank: int, ranks: int, port: int, folder: Path) -> None:
    """Train, and publish every step, until there is a stop file."""
    log_to_stderr()
    device = _join(rank, ranks, port)
    _run(service, folder, device)
    leave_ranks()


if __name__ == "__main__":
    main()
