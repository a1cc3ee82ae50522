from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import Trainer, release_at_once
from tests.support.server import RunningService


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left goes out at once."""
    release_at_once(monkeypatch)


@pytest.fixture
def watchful(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does, and idle streams are looked after often."""
    monkeypatch.setattr("deltasync.api.subscribe._PROGRESS_SECONDS", 0.02)


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """Has a consumer for each of the file's POLICIES, and copies checkpoints if the file has CHECKPOINTS."""
    url = str(tmp_path / "checkpoints") if getattr(request.module, "CHECKPOINTS", False) else None
    with RunningService(tmp_path / "data", policies=request.module.POLICIES, checkpoints=url) as service:
        yield service


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    """One of the service's, which has published nothing yet."""
    with Trainer(service.grpc) as trainer:
        yield trainer
