from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import release_at_once
from tests.support.server import RunningService


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left goes out at once."""
    release_at_once(monkeypatch)


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """Has a consumer for each of the file's POLICIES."""
    with RunningService(tmp_path / "data", policies=request.module.POLICIES) as running:
        yield running
