"""Fixtures that several kinds of tests need."""

import os

os.environ["DELTASYNC_LOG_FORMAT"] = "text"  # Of processes that tests start, whose lines they look for.
os.environ["DELTASYNC_CHECK_THREADS"] = "1"  # Read where classes are defined: before anything else is imported.

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support import examples  # noqa: F401  # registers the profiles
from tests.support.folders import keep_folders_in_memory
from tests.support.process import ServiceProcess

from deltasync.base.logs import levels
from deltasync.kernels.compiled import warm

settings.load_profile("default")

keep_folders_in_memory()
gc.disable()  # Until all tests are collected: what imports create stays, but each pass would look at it.


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before workers, and the processes that tests start, would all do so at once."""
    if not hasattr(config, "workerinput"):
        warm()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector ignore modules and tests, which stay to the end."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a GPU where there is none."""
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        from tests.support.devices import skip_without_gpu  # It imports torch, which most tests do without.

        skip_without_gpu(on_gpu)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer has set must not reach the tests."""
    for name in os.environ:
        ours = name.startswith("DELTASYNC_") and name not in ("DELTASYNC_CHECK_THREADS", "DELTASYNC_LOG_FORMAT")
        if ours or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def same_log_levels() -> Iterator[None]:
    """What a service in the test's own process was told to log holds for no other test."""
    ours = [each for name, each in logging.root.manager.loggerDict.items() if name.startswith("deltasync")]
    before = [(each, each.level) for each in ours if isinstance(each, logging.Logger)]
    yield
    for name in levels().keys() - {each.name for each, _ in before}:
        logging.getLogger(name).setLevel(logging.NOTSET)
    for logger, level in before:
        if logger.level != level:
            logger.setLevel(level)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service of its own process, on free ports, with consumer "predictors" of model "clicks"."""
    process = ServiceProcess(tmp_path / "data", "--consumer", "predictors=clicks")
    with process:
        yield process
