"""Checkpoints of a training run: weights, optimizer, and what was published of them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.trainer.sync import DeltaSync


def save_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> None:
    """Write a checkpoint into `folder`. Called by all ranks together, between steps."""
    if dist.get_rank() == 0:  # With older sync files, changes of the newer weights would not be published.
        for stale in _sync_files(folder):
            stale.unlink()
    dist.barrier()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    torch.save(sync.state_dict(), folder / f"sync-{dist.get_rank()}.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> bool:
    """Go on from a checkpoint, of however many ranks, before the first step; whether there is one.

    Raises:
        InvalidInput: the sync state of a rank is missing: the run ended while the checkpoint was written.
    """
    if not (folder / ".metadata").exists():
        return False
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # Mapped, since only this rank's rows are read of other ranks' files.
    sync.load_state_dict([torch.load(file, weights_only=True, mmap=True) for file in _sync_files(folder)])
    return True


def _sync_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("sync-*.pt"))
