"""The checkpoints of a training run, which are written while it goes on."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torchrec.optim.keyed import CombinedOptimizer

from deltasync.core.errors import StorageFailed
from deltasync.trainer.clicks.checkpoint import load_checkpoint, state_of, write_checkpoint
from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.sync import DeltaSync

logger = logging.getLogger(__name__)

_KEPT = 2
_NAME = re.compile(r"step-[0-9]{12}")
_PARTIAL = "partial"


class Checkpoints:
    """A folder for each of the last two, `step-NNN`; one that is not whole yet is `partial`.

    All ranks call the same methods after the same steps, and see the same files. Training waits until its state is
    copied in host memory; another thread writes it, in a group of ranks of its own.
    """

    def __init__(
        self, folder: Path, every: int, model: nn.Module, optimizer: CombinedOptimizer, sync: DeltaSync
    ) -> None:
        """Of a run, one after `every` steps."""
        self._folder, self._every, self._steps = folder, every, 0
        self._model, self._optimizer, self._sync = model, optimizer, sync
        self._training, self._writing = (dist.new_group(backend="gloo") for _ in range(2))
        self._rank = dist.get_rank()
        self._thread = ThreadPoolExecutor(1, "deltasync-checkpoint")
        self._written: Future[bool] | None = None

    def load(self) -> bool:
        """Go on from the newest one, before the first step; whether there is one.

        Raises:
            InvalidInput: see `load_checkpoint`.
        """
        whole = checkpoints_in(self._folder)
        if not whole:
            return False
        found = load_checkpoint(whole[-1], self._model, self._optimizer, self._sync)
        logger.info("going on from checkpoint %s, after step %d", whole[-1], self._sync.tracker.steps)
        return found

    def step(self) -> None:
        """Note that a step is complete; begin to write one, if it is time to."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.save()

    def save(self) -> None:
        """Begin to write one, of now, between steps; it is left out where the one before is not written yet."""
        busy = self._written is not None and not self._written.done()
        if on_any_rank([busy], self._training)[0]:
            logger.warning(
                "no checkpoint after step %d: the one before is not written yet", self._sync.tracker.steps
            )
            return
        state = BlockingAsyncStager().stage(state_of(self._model, self._optimizer))
        step, sync = self._sync.tracker.steps, self._sync.state_dict()
        self._written = self._thread.submit(self._write, self._folder / f"step-{step:012}", state, sync)

    def finish(self) -> None:
        """Write a last one, of now, and wait for it.

        Raises:
            StorageFailed: it could not be written, on this rank or another; the log says why.
        """
        if self._written:
            wait_for([self._written])
        self.save()
        self._thread.shutdown()
        if not (self._written and self._written.result()):
            raise StorageFailed(f"no checkpoint of the end of the run is in {self._folder}: the log says why")

    # The thread that writes.

    def _write(self, folder: Path, state: dict[str, Any], sync: Mapping[str, Any]) -> bool:
        """Write a checkpoint; whether it is there."""
        partial = self._folder / _PARTIAL
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not self._done(folder, lambda: write_checkpoint(partial, state, sync, self._writing)):
            return False
        return self._done(folder, lambda: self._complete(partial, folder) if self._rank == 0 else None)

    def _done(self, folder: Path, write: Callable[[], None]) -> bool:
        """Whether it could be done on all ranks."""
        failed = False
        try:
            write()
        except Exception:  # The next one may succeed, and training goes on.
            logger.exception("the checkpoint %s could not be written", folder)
            failed = True
        return not on_any_rank([failed], self._writing)[0]

    def _complete(self, partial: Path, folder: Path) -> None:
        if folder.exists():  # A run that went on from it may end at once.
            shutil.rmtree(partial)
            return
        for file in (*partial.iterdir(), partial):
            _to_disk(file)
        partial.rename(folder)
        _to_disk(self._folder)
        logger.info("checkpoint %s is written", folder)
        try:
            for older in checkpoints_in(self._folder)[:-_KEPT]:
                older.rename(partial)  # Half of it may be left.
                shutil.rmtree(partial)
        except OSError as error:  # Say, somebody reads it. The next one tries again.
            logger.warning("an older checkpoint could not be removed: %s", error)


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of whole checkpoints, the oldest first."""
    return sorted(each for each in folder.glob("step-*") if _NAME.fullmatch(each.name))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
