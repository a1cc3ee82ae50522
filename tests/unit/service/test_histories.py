"""What the replicas of a consumer served when, as a service writes it."""

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.support.local_service import publish
from tests.unit.support.async_tests import in_service

from deltasync.core.policy import Policy
from deltasync.service.rollback import roll_back
from deltasync.service.service import Service

HOUR = 3600 * 10**9


@in_service()
async def test_no_line_is_from_the_future_after_a_clock_was_ahead(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a follower would wait for an hour."""
    now, ahead = time.time_ns, [0]
    monkeypatch.setattr("deltasync.service.serving_history._LOOK_SECONDS", 0.001)
    monkeypatch.setattr("deltasync.service.serving_history.time.time_ns", lambda: now() + ahead[0])
    session = await publish(service)
    assert session.coordinator.model.position.number == 1
    consumer = await service.consumers.create("canary", "clicks", Policy())

    async def newest(is_right: Callable[[int, dict[str, int]], bool]) -> None:
        while True:
            lines = (await service.histories.of("canary", 2 * 3600.0, 1)).lines
            if lines and is_right(lines[0].unix_ns, dict(lines[0].replicas)):
                return
            await asyncio.sleep(0.001)

    running = asyncio.create_task(service.histories.run())
    try:
        async with asyncio.timeout(10):
            replica = service.registry.connect(consumer, "a", asyncio.Event())
            service.registry.acknowledge(consumer, replica, session.coordinator.model.position)
            await newest(lambda unix_ns, replicas: unix_ns < now() and replicas == {"a": 0})
            ahead[0] = HOUR
            replica.checked = True
            await newest(lambda unix_ns, replicas: unix_ns > now() + HOUR // 2 and replicas == {"a": 1})
            ahead[0] = 0
            await newest(lambda unix_ns, replicas: unix_ns < now() and replicas == {"a": 1})
    finally:
        running.cancel()
    lines = (await service.histories.of("canary", 3600.0, 9)).lines
    assert [dict(line.replicas) for line in lines] == [{"a": 0}, {"a": 1}]


@pytest.mark.parametrize("rolls_back", [False, True])
@in_service()
async def test_a_withdrawn_objection_has_the_version_that_was_served_then(
    service: Service, monkeypatch: pytest.MonkeyPatch, rolls_back: bool
) -> None:
    monkeypatch.setattr("deltasync.service.serving_history._LOOK_SECONDS", 0.001)
    session = await publish(service)
    if rolls_back:  # The newest version has the rows of version 1 again.
        await service.versions.keep("clicks")
        await roll_back(service.models, "clicks", "1", service.events, "me")
        await session.coordinator.settled()
    consumer = await service.consumers.create("canary", "clicks", Policy())
    replica = service.registry.connect(consumer, "a", asyncio.Event())
    service.registry.acknowledge(consumer, replica, session.coordinator.model.position)
    replica.checked = True
    running = asyncio.create_task(service.histories.run())
    try:
        async with asyncio.timeout(10):
            while not (await service.histories.of("canary", 60.0, 1)).lines:
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
    await service.following.object("canary", "its AUC fell")
    await service.following.withdraw("canary")
    assert consumer.objection
    assert consumer.objection.until_version == 1
    assert not consumer.objection.in_force
