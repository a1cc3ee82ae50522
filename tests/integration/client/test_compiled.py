"""A replica whose dense part was compiled follows a trainer over a real service."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compiled import KEEP, Model, Over, as_written, compile_over, compiled_model, tables_of
from tests.support.fleet import Trainer, follow, release_at_once, wait_for_lag, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client.torch_target import TorchTarget

IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [5, 5]])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_over(tmp_path_factory.mktemp("packages") / "over.pt2", **KEEP)


def expected(trainer: Trainer) -> torch.Tensor:
    """What the model that the trainer holds puts out, as it was written."""
    model = Model(Over()).eval()
    state = {name.replace("user", "user.weight"): torch.from_numpy(rows) for name, rows in trainer.rows.items()}
    shapes = model.state_dict()
    model.load_state_dict({name: each.reshape(shapes[name].shape) for name, each in state.items()}, strict=False)
    with torch.no_grad():
        found: torch.Tensor = model(IDS)
    return found


def test_a_compiled_replica_is_in_sync_and_damage_to_it_is_repaired(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_at_once(monkeypatch)
    monkeypatch.setattr("deltasync.api.subscribe._PROGRESS_SECONDS", 0.02)
    target = TorchTarget(compiled_model(package))

    def output() -> torch.Tensor:
        with target.reading() as reading, torch.no_grad():
            found: torch.Tensor = reading.module(IDS)
            return found

    with (
        RunningService(tmp_path / "data") as service,
        Trainer(service.grpc, tables_of(as_written(1))) as trainer,
        follow(service, "predictors", "a", target),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        assert torch.equal(output(), expected(trainer))
        for _ in range(5):
            wait_until_in_sync(service, "predictors", trainer.change(2))
            assert torch.equal(output(), expected(trainer))
        with target.reading() as reading, torch.inference_mode():
            reading.module.get_buffer("over.layers.0.weight")[3, 2] += 1
        assert not torch.equal(output(), expected(trainer))

        def repaired(lag: dict[str, Any]) -> bool:
            return lag["state"] == "in sync" and torch.equal(output(), expected(trainer))

        wait_for_lag(service, "predictors", repaired)
