"""Checkpoints of a training run: weights, optimizer, and what was published of them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import CombinedOptimizer

from trainer.sync import DeltaSync


def save_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> None:
    """Write a checkpoint into `folder`. Called by all ranks together, between steps."""
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    torch.save(sync.state_dict(), _sync_file(folder))


def load_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> bool:
    """Go on from a checkpoint of as many ranks, before the first step; whether there is one.

    Raises:
        Contradiction: it was made for another sharding.
    """
    if not _sync_file(folder).exists():
        return False
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sync.load_state_dict(torch.load(_sync_file(folder), weights_only=True))
    return True


def _sync_file(folder: Path) -> Path:
    return folder / f"sync-{dist.get_rank()}.pt"
