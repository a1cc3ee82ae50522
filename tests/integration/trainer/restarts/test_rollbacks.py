"""Trainers after a rollback: which may publish, and what the others raise."""

from pathlib import Path

import pytest
from tests.integration.trainer.following import WAIT, Trainer, expect
from tests.support.command import deltasync
from tests.support.server import TOKEN, RunningService

from deltasync.base.errors import RunRefused
from deltasync.client import Admin, Endpoint
from deltasync.trainer import load_export


@pytest.fixture
def admin(running: RunningService) -> Admin:
    return Admin(Endpoint(running.http, TOKEN))


@pytest.fixture
def rolled_back(running: RunningService, admin: Admin) -> Trainer:
    """The trainer whose model was rolled back."""
    trainer = Trainer(running.grpc)
    trainer.sync.flush(WAIT)
    admin.keep_version("clicks", "good")
    trainer.step()
    trainer.sync.flush(WAIT)
    admin.roll_back("clicks", "good")
    return trainer


def test_the_running_trainer_stops_with_an_error(rolled_back: Trainer) -> None:
    with pytest.raises(RunRefused, match="the model was rolled back to version 1: restart the trainer of run"):
        rolled_back.step_for_ever()
    rolled_back.sync.abort()


def test_rolled_back_weights_are_published_only_with_start_over(
    running: RunningService, rolled_back: Trainer
) -> None:
    rolled_back.sync.abort()
    weights = {name: each.clone() for name, each in rolled_back.model.state_dict().items()}
    reloaded = Trainer(running.grpc, weights)
    with pytest.raises(RunRefused, match=r"without a DeltaSync state.* SyncOptions\(start_over=True\)"):
        reloaded.step_for_ever()
    reloaded.sync.abort()
    assert running.get_json("/versions?last=1")[0]["run"].startswith("rollback-to-1-")
    vouched = Trainer(running.grpc, weights, start_over=True)
    expect(running, vouched.sync, vouched.model)
    vouched.sync.abort()


def test_a_trainer_continues_from_the_version_of_a_rollback(
    running: RunningService, rolled_back: Trainer, tmp_path: Path
) -> None:
    rolled_back.sync.abort()
    again, file, at = Trainer(running.grpc), tmp_path / "good", f"{tmp_path}/data/checkpoints"
    code, _, err = deltasync("export", "clicks", str(file), "--at", at, "--version", "good")
    assert code == 0, err
    again.sync.load_state_dict([load_export(again.model, file)])
    again.step()
    expect(running, again.sync, again.model)
    again.sync.abort()
