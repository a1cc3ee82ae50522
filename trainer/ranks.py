"""Joining the other ranks under torchrun."""

import os

import torch
import torch.distributed as dist


def join_ranks() -> torch.device:
    """Join the process group torchrun has set up; the device of this rank: a GPU each where there are any."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device
