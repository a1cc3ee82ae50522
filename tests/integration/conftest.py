import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.server import RunningService


@pytest.fixture(autouse=True)
def metrics_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; a service in a process of its own shares them for a tenth of a second."""
    monkeypatch.setattr("deltasync.status.answers._SHARED_SECONDS", 0)


@pytest.fixture
def running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[RunningService]:
    """A service in a thread; nothing that it did not foresee may have happened in it."""
    with RunningService(tmp_path / "data") as service:
        yield service
    unforeseen = [
        record.getMessage()
        for when in ("setup", "call", "teardown")
        for record in caplog.get_records(when)
        if record.levelno >= logging.ERROR
        and record.name.startswith(("asyncio", "grpc", "uvicorn", "deltasync.api"))
    ]
    assert not unforeseen
