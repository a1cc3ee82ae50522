"""A checkpoint of a training run: weights, optimizer, and what was published of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.trainer.checks import check_format
from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.sync import DeltaSync

# Of what lies in a checkpoint's folder, and under which names.
_FORMAT, _FORMAT_FILE = 1, "format"


def state_of(model: nn.Module, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """What a checkpoint has of both: their own tensors, not copies."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> None:
    """Write a checkpoint into `folder`, and wait for it. Called by all ranks together, between steps.

    Raises:
        OSError: see `write_checkpoint`.
    """
    write_checkpoint(folder, state_of(model, optimizer), sync.state_dict())


def write_checkpoint(
    folder: Path, state: dict[str, Any], sync: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint into `folder`. Called by all ranks of a group together.

    Args:
        folder: in which all ranks see the same files.
        state: `state_of`, or a copy.
        sync: that of this rank's `DeltaSync`, after the same step.
        group: of gloo, and of this alone where another thread has collectives meanwhile; None is the default one.

    Raises:
        OSError: a file could not be written, on this rank or another.
    """
    error = _begin(folder) if dist.get_rank() == 0 else None
    if on_any_rank([error is not None], group)[0]:
        raise error or OSError(f"rank 0 could not begin the checkpoint {folder}")
    save(state, checkpoint_id=folder, process_group=group)
    torch.save(sync, folder / f"sync-{dist.get_rank()}.pt")


def _begin(folder: Path) -> OSError | None:
    """Prepare the folder for all ranks; the error, of which the others are to hear."""
    try:
        for stale in _sync_files(folder):  # With these, changes of the newer weights would not be published.
            stale.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FORMAT_FILE).write_text(f"{_FORMAT}\n")
    except OSError as error:
        return error
    return None


def load_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> bool:
    """Go on from a checkpoint, of however many ranks, before the first step; whether there is one.

    Raises:
        InvalidInput: the sync state of a rank is missing: the run ended while the checkpoint was written. Or the
            checkpoint has a newer format.
    """
    if not (folder / ".metadata").exists():
        return False
    check_format(f"the checkpoint in {folder}", _format(folder), _FORMAT)
    state = state_of(model, optimizer)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # Mapped, since only this rank's rows are read of other ranks' files.
    sync.load_state_dict([torch.load(file, weights_only=True, mmap=True) for file in _sync_files(folder)])
    return True


def _format(folder: Path) -> int | str:
    file = folder / _FORMAT_FILE
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return int(text) if text.isdecimal() else text


def _sync_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("sync-*.pt"))
