"""What tests of several commands use."""

import pytest

from deltasync.api import process
from deltasync.service.options import ServiceOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServiceOptions]:
    """What the server was asked to run with."""
    options: list[ServiceOptions] = []

    async def record(given: ServiceOptions, *_: object) -> None:
        options.append(given)

    monkeypatch.setattr(process, "serve", record)
    return options
