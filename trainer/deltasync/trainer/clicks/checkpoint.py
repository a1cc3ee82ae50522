"""Checkpoints of a training run: weights, optimizer, and what was published of them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.trainer.checks import check_format
from deltasync.trainer.sync import DeltaSync

# Of what lies in a checkpoint's folder, and under which names. Folders without this file are of the first.
_FORMAT, _FORMAT_FILE = 1, "format"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> None:
    """Write a checkpoint into `folder`. Called by all ranks together, between steps."""
    if dist.get_rank() == 0:  # With older sync files, changes of the newer weights would not be published.
        for stale in _sync_files(folder):
            stale.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FORMAT_FILE).write_text(f"{_FORMAT}\n")
    dist.barrier()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    torch.save(sync.state_dict(), folder / f"sync-{dist.get_rank()}.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> bool:
    """Go on from a checkpoint, of however many ranks, before the first step; whether there is one.

    Raises:
        InvalidInput: the sync state of a rank is missing: the run ended while the checkpoint was written. Or the
            checkpoint has a newer format.
    """
    if not (folder / ".metadata").exists():
        return False
    check_format(f"the checkpoint in {folder}", _format(folder), _FORMAT)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # Mapped, since only this rank's rows are read of other ranks' files.
    sync.load_state_dict([torch.load(file, weights_only=True, mmap=True) for file in _sync_files(folder)])
    return True


def _format(folder: Path) -> int | str:
    file = folder / _FORMAT_FILE
    text = file.read_text(errors="replace").strip() if file.exists() else "1"
    return int(text) if text.isdecimal() else text


def _sync_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("sync-*.pt"))
