from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import AT_ONCE, Trainer
from tests.support.server import RunningService
from tests.support.shared_memory import folder

__all__ = ["folder", "service", "trainer"]


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """A service with the file's POLICIES and OPTIONS, which copies checkpoints if the file has CHECKPOINTS."""
    file = request.module
    url = str(tmp_path / "checkpoints") if getattr(file, "CHECKPOINTS", False) else None
    options: dict[str, Any] = {"policies": file.POLICIES, "checkpoints": url, "releases": AT_ONCE} | getattr(
        file, "OPTIONS", {}
    )
    options |= getattr(request, "param", {})
    with RunningService(tmp_path / "data", **options) as service:
        yield service


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    """One of the service's, which has published nothing yet."""
    with Trainer(service.grpc) as trainer:
        yield trainer
