"""What tests of several commands use."""

import pytest

from deltasync.api import process
from deltasync.api.process import ServerOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """What the server was asked to run with."""
    options: list[ServerOptions] = []

    async def record(given: ServerOptions) -> None:
        options.append(given)

    monkeypatch.setattr(process, "serve", record)
    return options
