"""Checkpoints of a training run: weights, optimizer and the published versions."""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.base.errors import StorageFailed
from deltasync.base.files import flush
from deltasync.trainer.checks import check_format
from deltasync.trainer.distributed.agreement import Agreement, on_any_rank
from deltasync.trainer.distributed.ranks import begun_together
from deltasync.trainer.sync import DeltaSync

logger = logging.getLogger(__name__)

# The format of a checkpoint folder, and the name of the file that records it.
_FORMAT, _FORMAT_FILE = 1, "format"
_KEPT = 2
_NAME = re.compile(r"step-[0-9]{12}")
_PARTIAL = "partial"


class TrainerCheckpoints:
    """Writes and loads checkpoints of a run. Keeps the last two, in folders `step-NNN`.

    All ranks call the same methods after the same steps, and share the folder. Training only waits until its state
    is copied to host memory. Another thread, with its own process group, writes the state to the folder `partial`
    and then renames that folder.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        model: nn.Module,
        optimizer: CombinedOptimizer,
        sync: DeltaSync,
        write: Callable[..., None] | None = None,
    ) -> None:
        """Prepare; `write` replaces `write_checkpoint`."""
        self._write_files = write or write_checkpoint
        self._folder, self._every, self._steps = folder, every, 0
        self._model, self._optimizer, self._sync = model, optimizer, sync
        with begun_together("TrainerCheckpoints", {"every": every}):
            pass
        self._training = Agreement("TrainerCheckpoints", "step")
        self._writing = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "deltasync-checkpoint")
        self._written: Future[bool] | None = None

    def load(self) -> bool:
        """Continue from the newest checkpoint, before the first step; returns False if there is none."""
        if not (complete := checkpoints_in(self._folder)):
            return False
        load_checkpoint(complete[-1], self._model, self._optimizer, self._sync)
        logger.info("continues from checkpoint %s, after step %d", complete[-1], self._sync.tracker.steps)
        return True

    def step(self) -> None:
        """Record a complete step, and start a checkpoint after every `every` steps."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.save()

    def save(self) -> None:
        """Start a checkpoint between two steps, unless the previous one is still being written."""
        busy = self._written is not None and not self._written.done()
        step = self._sync.tracker.steps
        self._training.note(step)
        if self._training.any_of(busy):
            logger.warning("no checkpoint after step %d: the previous one is still being written", step)
            return
        state = BlockingAsyncStager().stage(state_of(self._model, self._optimizer))
        folder = self._folder / f"step-{step:012}"
        self._written = self._thread.submit(self._write, folder, state, self._sync.state_dict())

    def finish(self) -> None:
        """Write a last checkpoint and wait for it."""
        if self._written:
            wait_for([self._written])
        self.save()
        self._thread.shutdown()
        if not (self._written and self._written.result()):
            raise StorageFailed(f"the last checkpoint is missing in {self._folder}: see the log for the reason")

    def _write(self, folder: Path, state: dict[str, Any], sync: Mapping[str, Any]) -> bool:
        """Write a checkpoint in the other thread; returns False if a rank could not."""
        partial = self._folder / _PARTIAL
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not self._succeeds(folder, lambda: self._write_files(partial, state, sync, self._writing)):
            return False
        return self._succeeds(folder, lambda: self._complete(partial, folder) if dist.get_rank() == 0 else None)

    def _succeeds(self, folder: Path, write: Callable[[], None]) -> bool:
        failed = False
        try:
            write()
        except Exception:  # Training continues, and the next checkpoint may succeed.
            logger.exception("the checkpoint %s could not be written", folder)
            failed = True
        return not on_any_rank([failed], None, self._writing)[0]  # No timeout: large checkpoints take long.

    def _complete(self, partial: Path, folder: Path) -> None:
        if folder.exists():  # A run that continues from this checkpoint may end before its first step.
            shutil.rmtree(partial)
            return
        for file in (*partial.iterdir(), partial):
            flush(file)
        partial.rename(folder)
        flush(self._folder)
        logger.info("checkpoint %s is written", folder)
        try:
            for older in checkpoints_in(self._folder)[:-_KEPT]:
                older.rename(partial)  # A half-deleted folder must not look like a complete checkpoint.
                shutil.rmtree(partial)
        except OSError as error:  # Another process may be reading it. The next checkpoint tries again.
            logger.warning("an older checkpoint could not be removed: %s", error)


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, the oldest first."""
    return sorted(each for each in folder.glob("step-*") if _NAME.fullmatch(each.name))


def state_of(model: nn.Module, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """The state for a checkpoint: the tensors themselves, not copies."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def write_checkpoint(
    folder: Path, state: dict[str, Any], sync: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint. All ranks of a gloo group, which no other thread uses, call this together."""
    error: OSError | None = None
    if dist.get_rank() == 0:
        try:
            # Old sync files with newer weights would hide changes, so delete them first.
            for stale in folder.glob("sync-*.pt"):
                stale.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _FORMAT_FILE).write_text(f"{_FORMAT}\n")
        except OSError as failure:
            error = failure
    if on_any_rank([error is not None], f"the checkpoint {folder}", group)[0]:
        raise error or OSError(f"rank 0 could not start the checkpoint {folder}: see its log")
    save(state, checkpoint_id=folder, process_group=group)
    torch.save(sync, folder / f"sync-{dist.get_rank()}.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync) -> None:
    """Continue from a checkpoint, before the first step. The number of ranks may differ."""
    file = folder / _FORMAT_FILE
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    check_format(f"the checkpoint in {folder}", int(text) if text.isdecimal() else text, _FORMAT)
    state = state_of(model, optimizer)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # Map the files instead of loading them: this rank needs only its own rows of the other ranks' states.
    files = sorted(folder.glob("sync-*.pt"))
    sync.load_state_dict([torch.load(file, weights_only=True, mmap=True) for file in files])
