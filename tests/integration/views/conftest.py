from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import admin_of
from tests.support.server import RunningService

from deltasync.client import Admin


@pytest.fixture
def service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> Iterator[RunningService]:
    """A service with the file's POLICIES and OPTIONS, in which no replica differs or stops."""
    options = getattr(request.module, "OPTIONS", {})
    with RunningService(tmp_path / "data", policies=request.module.POLICIES, **options) as running:
        yield running
    said = [record.getMessage() for record in caplog.get_records("call")]
    assert not [each for each in said if "holds other rows" in each]
    assert not [each for each in said if "stopped: " in each]


@pytest.fixture
def admin(service: RunningService) -> Admin:
    return admin_of(service)
