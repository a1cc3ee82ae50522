"""Join and leave torchrun's process group, and find the ranks that share a model."""

import gc
import logging
import os
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import ShardedModule

logger = logging.getLogger(__name__)

_WITH_CUDA_KERNELS = ("fbgemm-gpu", "fbgemm-gpu-nightly")


def choose_device(gpus: int, local_ranks: int, cuda_kernels: bool) -> tuple[str, str]:
    """The device to train on, "cuda" or "cpu", and the reason.

    Args:
        gpus: GPUs of this machine.
        local_ranks: ranks on this machine.
        cuda_kernels: whether the installed fbgemm has kernels for GPUs.
    """
    if gpus == 0:
        return "cpu", "there is no GPU"
    if not cuda_kernels:
        return "cpu", "fbgemm is installed without kernels for GPUs: `make install CUDA=1` installs them"
    if gpus < local_ranks:
        return "cpu", f"{local_ranks} ranks need a GPU each, but there are only {gpus}"
    return "cuda", f"{local_ranks} ranks have a GPU each"


def join_ranks() -> torch.device:
    """Join torchrun's process group; returns the device of this rank."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda_kernels = any(_installed(package) for package in _WITH_CUDA_KERNELS)
    kind, reason = choose_device(torch.cuda.device_count(), local_ranks, cuda_kernels)
    logger.info("rank %s trains on %s: %s", os.environ["RANK"], kind, reason)
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def leave_ranks() -> None:
    """Leave the process group and end its threads. First drop the model and all other users of a group.

    A gloo thread that still frees memory of the last collective would abort a process that exits (torch 2.13).
    """
    dist.destroy_process_group()
    gc.collect()  # Modules in reference cycles keep the group alive until they are collected.


def this_rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks() -> list[int]:
    """The ranks of the process group; without one, rank 0."""
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def ranks_of(model: nn.Module) -> list[int]:
    """The ranks that share a model; only this rank if the model is not distributed."""
    group = group_of(model)
    return dist.get_process_group_ranks(group) if group else [this_rank()]


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of a model's DistributedDataParallel, or else of its sharded tables; None if it has neither."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group: dist.ProcessGroup = module.process_group
            return group
    environments = (
        getattr(module, "_env", None) for module in model.modules() if isinstance(module, ShardedModule)
    )
    return next((environment.process_group for environment in environments if environment), None)


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
