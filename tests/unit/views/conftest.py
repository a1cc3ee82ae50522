"""A model in this process, for tests that are coroutines."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import TABLES
from tests.support.wire import random_rows
from tests.unit.views.models import Models


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of a test and its fixtures."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def models(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Models]:
    models = Models(tmp_path / "data")
    yield models
    runner.run(models.close())


@pytest.fixture
def local(runner: asyncio.Runner, models: Models) -> LocalModel:
    """A model of two tables, of which every row is published."""
    rows = {table.name: dict(enumerate(some)) for table, some in zip(TABLES, random_rows(0, TABLES), strict=True)}
    return runner.run(models.published(*TABLES, rows=rows))
