import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.server import RunningService


@pytest.fixture
def running(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[RunningService]:
    """A service in a thread; nothing that it did not foresee may have happened in it. Its parameter: options."""
    with RunningService(tmp_path / "data", **getattr(request, "param", {})) as service:
        yield service
    unforeseen = [
        record.getMessage()
        for when in ("setup", "call", "teardown")
        for record in caplog.get_records(when)
        if record.levelno >= logging.ERROR
        and record.name.startswith(("asyncio", "grpc", "uvicorn", "deltasync.api"))
    ]
    assert not unforeseen


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """The path of a program of this environment, or a skip that says which is missing."""

    def find(name: str) -> str:
        found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        return found

    return find


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist  # Most tests here need no torch.

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()
