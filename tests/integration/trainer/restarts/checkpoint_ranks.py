"""The ranks of test_checkpoints: checkpoints are written while training goes on, or not at all."""

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import leave

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.trainer.checkpoints import (
    TrainerCheckpoints,
    checkpoints_in,
    load_checkpoint,
    state_of,
    write_checkpoint,
)
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.model import ClickModel
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.sync import DeltaSync, SyncOptions

SIZES = ModelOptions(users=20, items=30, cross_buckets=10, dim=4, hidden=4)


class Training:
    """A model whose steps change all rows of a table."""

    def __init__(self, folder: Path, every: int = 1, write: Callable[..., None] | None = None) -> None:
        device = torch.device("cpu")
        model = ClickModel(SIZES, torch.device("meta"))
        self.model, self.optimizer = shard(model, click_tables(), OptimizerOptions(), device)
        self.sync = DeltaSync(self.model, SyncOptions(service="localhost:1", model="m", publish_every=10**6))
        self.checkpoints = TrainerCheckpoints(folder, every, self.model, self.optimizer, self.sync, write)

    def step(self) -> None:
        with torch.no_grad():
            for weight in self._weights():
                weight.fill_(self.sync.tracker.steps + 1)
        self.sync.step()
        self.checkpoints.step()

    def values(self) -> set[float]:
        return {float(value) for weight in self._weights() for value in weight.flatten().tolist()}

    def _weights(self) -> list[torch.Tensor]:
        """The weights of the table that is sharded by rows."""
        tables = [table for table in self.sync.tracker.tables if table.name.endswith("user")]
        return [tracked.weight for table in tables for tracked in table.shards]


def names(folder: Path) -> list[str]:
    dist.barrier()
    return sorted(each.name for each in folder.iterdir())


def the_last_two_are_there(folder: Path) -> None:
    training = Training(folder, every=2)
    for _ in range(6):
        training.step()
        if training.checkpoints._written:
            training.checkpoints._written.result()
    training.checkpoints.finish()
    assert names(folder) == ["step-000000000004", "step-000000000006"]
    again = Training(folder)
    assert again.checkpoints.load()
    assert (again.sync.tracker.steps, again.values()) == (6, {6.0})


def a_checkpoint_has_the_weights_of_its_step(folder: Path) -> None:
    """Though those of later steps are there when it is written."""
    stepped = Future[None]()

    def late(*arguments: object) -> None:
        stepped.result()
        write_checkpoint(*arguments)  # type: ignore[arg-type]

    training = Training(folder, write=late)
    for _ in range(4):  # The first step begins a checkpoint; none is begun meanwhile.
        training.step()
    stepped.set_result(None)
    assert training.checkpoints._written
    assert training.checkpoints._written.result()
    assert names(folder) == ["step-000000000001"]
    again = Training(folder)
    assert again.checkpoints.load()
    assert (again.sync.tracker.steps, again.values()) == (1, {1.0})


def one_that_cannot_be_written_leaves_the_one_before(folder: Path) -> None:
    training = Training(folder)
    training.step()
    training.checkpoints.finish()

    def refused(partial: Path, *_: object) -> None:
        partial.mkdir(exist_ok=True)
        if dist.get_rank() == 1:
            raise OSError("no space left on device")

    again = Training(folder, write=refused)
    assert again.checkpoints.load()
    again.step()
    with pytest.raises(StorageFailed, match=f"the last checkpoint is missing in {folder}"):
        again.checkpoints.finish()
    assert names(folder) == ["partial", "step-000000000001"]
    third = Training(folder)
    assert third.checkpoints.load()
    assert third.values() == {1.0}
    third.step()
    third.checkpoints.finish()
    assert names(folder) == ["step-000000000001", "step-000000000002"], "what was left is gone"


def an_older_one_that_cannot_be_removed_does_no_harm(folder: Path) -> None:
    training, remove = Training(folder), shutil.rmtree

    def refused(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("directory not empty")
        remove(path, ignore_errors=True)

    with mock.patch.object(shutil, "rmtree", refused):
        for _ in range(4):
            training.step()
            assert training.checkpoints._written
            assert training.checkpoints._written.result()
    assert [each.name for each in checkpoints_in(folder)] == ["step-000000000003", "step-000000000004"]


def an_interrupted_one_is_not_continued(folder: Path) -> None:
    """Weights that are newer than the states of the ranks would be taken for published."""
    training = Training(folder)
    state, sync = state_of(training.model, training.optimizer), training.sync.state_dict()
    write_checkpoint(folder, state, sync)
    dist.barrier()
    interrupted = mock.patch("deltasync.trainer.checkpoints.save", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        write_checkpoint(folder, state, sync)
    dist.barrier()
    for format_, why in ((1, "got rank none"), (2, "is of format 2, this version reads 1: update")):
        (folder / "format").write_text(f"{format_}\n")
        dist.barrier()
        with pytest.raises(InvalidInput, match=why):
            load_checkpoint(folder, training.model, training.optimizer, training.sync)
        dist.barrier()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    assert not Training(folder / "none").checkpoints.load()
    the_last_two_are_there(folder / "two")
    a_checkpoint_has_the_weights_of_its_step(folder / "step")
    one_that_cannot_be_written_leaves_the_one_before(folder / "failed")
    an_older_one_that_cannot_be_removed_does_no_harm(folder / "stuck")
    an_interrupted_one_is_not_continued(folder / "interrupted")
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
