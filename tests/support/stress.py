"""Pytest plugin that provokes races: `python -m pytest -p tests.support.stress FILES`, or `make stress`.

It runs files, and the tests of a file, in random order. Meanwhile other processes use the cores now and then, the
interpreter switches threads often, and threads pause where they hand work to each other or to an event loop.
Services and ranks that `forks` starts do so, too. STRESS_SEED repeats the order and, as far as threads allow, the
pauses.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

SEED = "STRESS_SEED"
# CPython's default is 5 ms.
_SWITCH_SECONDS = 2e-5
# How often a pause of at most this number of seconds follows: threads that are short of a core, and busy machines.
_PAUSES = ((0.05, 0.004), (0.002, 0.1))
# An event loop runs far more callbacks than threads hand work to each other.
_LOOP_PAUSES = ((0.002, 0.02),)
# Uses a core half of the time, until its parent ends.
_NEIGHBOUR = """
import os, random, time
parent, drawn = os.getppid(), random.Random(os.environ["STRESS_SEED"])
while os.getppid() == parent:
    until = time.monotonic() + drawn.uniform(0, 0.2)
    while time.monotonic() < until:
        pass
    time.sleep(drawn.uniform(0, 0.2))
"""

_drawn = random.Random()
_neighbours: list["subprocess.Popen[bytes]"] = []


def provoke(seed: str) -> None:
    """Provoke races in this process from now on."""
    _drawn.seed(seed)
    sys.setswitchinterval(_SWITCH_SECONDS)
    submit, tell, call = ThreadPoolExecutor.submit, asyncio.BaseEventLoop.call_soon_threadsafe, asyncio.Handle._run

    def submitted(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        return submit(pool, _between_pauses, work, *arguments, **named)

    def told(loop: asyncio.BaseEventLoop, *arguments: Any, **named: Any) -> Any:
        if asyncio._get_running_loop() is not loop:
            _pause(_PAUSES)
        return tell(loop, *arguments, **named)

    def called(handle: asyncio.Handle) -> None:
        _pause(_LOOP_PAUSES)
        call(handle)

    for owner, name, pausing in (
        (ThreadPoolExecutor, "submit", submitted),
        (asyncio.BaseEventLoop, "call_soon_threadsafe", told),
        (asyncio.Handle, "_run", called),
    ):
        setattr(owner, name, pausing)


def _between_pauses(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    _pause(_PAUSES)
    try:
        return work(*arguments, **named)
    finally:
        _pause(_PAUSES)


def _pause(pauses: tuple[tuple[float, float], ...]) -> None:
    for how_often, longest in pauses:
        if _drawn.random() < how_often:
            time.sleep(_drawn.uniform(0, longest))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(time.time_ns() % 1_000_000))
    provoke(os.environ[SEED])


def pytest_report_header() -> str:
    return f"stress: {SEED}={os.environ[SEED]}"


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        command = [sys.executable, "-c", _NEIGHBOUR]
        _neighbours.extend(subprocess.Popen(command) for _ in os.sched_getaffinity(0))


def pytest_sessionfinish() -> None:
    while _neighbours:
        neighbour = _neighbours.pop()
        neighbour.kill()
        neighbour.wait()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle files, and the tests of a file unless it is marked `in_order`. All workers draw the same order."""
    files = dict[str, list[pytest.Item]]()
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    order = random.Random(os.environ[SEED])
    shuffled = list(files.values())
    order.shuffle(shuffled)
    for tests in shuffled:
        if not tests[0].get_closest_marker("in_order"):
            order.shuffle(tests)
    items[:] = [test for tests in shuffled for test in tests]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same pauses for a test whichever tests ran before it."""
    _drawn.seed(f"{os.environ[SEED]} {item.nodeid}")
