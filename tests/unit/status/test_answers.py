# mypy: disable-error-code="union-attr, operator"
"""Who asks how far replicas are behind holds up nobody, and is held up by nobody."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import publish, send, sources
from tests.support.wire import part
from tests.unit.support.async_tests import in_service

from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.cuts.session import PublishSession
from deltasync.model import model as models
from deltasync.model.model import Model
from deltasync.service.service import Service
from deltasync.status import answers as module
from deltasync.status.answers import Answers
from deltasync.status.metrics import Figures, exposition
from deltasync.views import view as views
from deltasync.views.table import ViewTable

CONSUMERS = 40
EVERYTHING, TOP = Policy(), Policy(top_k=1)


async def published(service: Service, *policies: Policy) -> tuple[PublishSession, Model]:
    """Version 1 of two tables, and consumers, of which a replica has it; they have these policies in turn."""
    session = await publish(service)
    coordinator = await service.publishing.open("clicks")
    await coordinator.drain()
    for number in range(CONSUMERS):
        policy = policies[number % len(policies)]
        consumer = await service.consumers.create(f"c{number}", "clicks", policy)
        replica = service.registry.connect(consumer, "r", asyncio.Event())
        service.registry.acknowledge(consumer, replica, Position(session.sealed.history, 1))
    return session, coordinator.model


class HeldThread:
    """A model's thread that does nothing until it is let go: one that applies a large cut."""

    def __init__(self, model: Model) -> None:
        self._let_go = threading.Event()
        self._task = asyncio.create_task(model.on_thread(self._let_go.wait, 20))

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        self._let_go.set()
        assert await self._task


@in_service()
async def test_answers_wait_for_no_cut(service: Service) -> None:
    session, model = await published(service, EVERYTHING, TOP)
    answers = Answers(sources(service))
    async with HeldThread(model):
        sending = asyncio.create_task(send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))])))
        while session.sealed.number < 2:  # Sealed, and not applied yet.
            await asyncio.sleep(0)
        lag = await answers.consumer("c0")
        assert (lag.head, lag.lag.versions, lag.lag.rows) == (2, 1, 0)
        assert b'deltasync_consumer_lag_versions{consumer="c0"} 1.0' in await answers.metrics()
        assert (await answers.consumer("c1")).head == 2
    await sending


def noting_threads(function: Callable[..., Any], threads: set[threading.Thread]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return function(*arguments, **named)

    return noted


@in_service()
async def test_no_table_is_looked_at_in_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tables and consumers there are, the loop goes on meanwhile."""
    await published(service, EVERYTHING, TOP)
    answers, threads = Answers(sources(service)), set[threading.Thread]()
    for where, name in (
        (models, "table_status"),
        (views, "TableStatus"),
        (ViewTable, "lacking"),
        (module, "exposition"),
        (module, "report"),
    ):
        monkeypatch.setattr(where, name, noting_threads(getattr(where, name), threads))
    await asyncio.gather(answers.metrics(), *(answers.consumer(f"c{number}") for number in range(CONSUMERS)))
    assert threads
    assert threading.current_thread() not in threads
    assert not any(thread.name.startswith("model") for thread in threads)


class HeldExposition:
    """Holds up the computing of metrics until it is let go; `begun` counts how often it was begun."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self._loop = asyncio.Semaphore(0), asyncio.get_running_loop()
        self._let_go = threading.Semaphore(0)
        patch.setattr(module, "exposition", self._held)

    def let_go(self) -> None:
        self._let_go.release()

    def _held(self, figures: Figures, now: int) -> bytes:
        self._loop.call_soon_threadsafe(self.begun.release)
        assert self._let_go.acquire(timeout=20)
        return exposition(figures, now)


@pytest.mark.parametrize("seconds", [0, 1000])
@in_service()
async def test_who_asks_for_metrics_at_nearly_the_same_time_shares_them(
    service: Service, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    session, _ = await published(service, EVERYTHING, TOP)
    answers, held = Answers(sources(service), seconds), HeldExposition(monkeypatch)
    tasks = [asyncio.create_task(answers.metrics()) for _ in range(3)]
    await held.begun.acquire()
    await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
    assert (await answers.consumer("c0")).head == 2  # Does not wait for them.
    tasks[0].cancel()  # One who has gone away takes nothing from the others.
    held.let_go()
    texts = await asyncio.gather(*tasks[1:])
    assert b'head_version{model="clicks"} 1.0' in texts[0]
    assert texts[0] is texts[1]
    held.let_go()
    again = await answers.metrics()
    assert (again is texts[0]) == (seconds > 0)
    assert (b'head_version{model="clicks"} 2.0' in again) == (seconds == 0)
