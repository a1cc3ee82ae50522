"""The ranks of test_ranks: collectives and publishing of several ranks that share a GPU, or a CPU."""

import sys

import torch
import torch.distributed as dist
from tests.support.devices import CANNOT_SHARE, device_of
from torch import nn

from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.sync import DeltaSync, SyncOptions


def joined(kind: str) -> torch.device:
    """Join the others; NCCL may refuse ranks that have one GPU together."""
    device = device_of(kind)
    if kind == "cpu":
        dist.init_process_group("gloo")
        return device
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl", device_id=device)
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.exit(CANNOT_SHARE + str(error).splitlines()[-1])
    return device


def main(kind: str, service: str) -> None:
    device = joined(kind)
    rank = dist.get_rank()
    assert on_any_rank([rank == 0, rank == 1, False], "a test", device=device) == [True, True, False]
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(device)
    with DeltaSync(model, SyncOptions(service=service, model="clicks", publish_every=2)) as sync:
        for step in range(7):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(step)
            sync.step()
        assert sync.flush(60).number > 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
