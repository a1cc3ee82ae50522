from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fleet import Trainer, release_at_once
from tests.support.server import RunningService

from deltasync.service.snapshots import SnapshotOptions


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
    """Has a consumer for each of the file's POLICIES, and makes snapshots where the file's SNAPSHOTS says so."""
    service = RunningService(tmp_path / "data", policies=request.module.POLICIES)
    if getattr(request.module, "SNAPSHOTS", False):
        snapshots = SnapshotOptions(url=str(tmp_path / "snapshots"), seconds=3600)
        service.options = replace(service.options, snapshots=snapshots)
    with service:
        yield service


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    """One of the service's, which has published nothing yet."""
    with Trainer(service.grpc) as trainer:
        yield trainer
