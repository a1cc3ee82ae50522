"""Versions of a model that a service keeps, by request and by schedule."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.faults import failing
from tests.support.local_service import SetClock, faults_of, publish, send
from tests.support.seals import sealed
from tests.support.wire import part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.base.events import Event, EventKind
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.consumers.follow import RolloutDelay
from deltasync.core.policy import Policy
from deltasync.cuts.session import PublishSession
from deltasync.service.kept_versions import outdated
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.overview import kept_statuses

MODEL = "clicks"


async def cut(session: PublishSession, step: int) -> None:
    await send(session, part(step, [(0, [step], np.full((1, 4), step, np.float32))]))
    await session.coordinator.settled()


@in_service()
async def test_the_newest_version_is_kept_under_a_name_and_released(service: Service) -> None:
    heard = list[Event]()
    service.events.listen(heard.append)
    with pytest.raises(NotFound, match="no model 'clicks'"):
        await service.versions.keep(MODEL)
    session = await publish(service)
    await cut(session, 2)
    kept = await service.versions.keep(MODEL, "good", "me")
    assert (kept.version, kept.name, kept.by, kept.seal) == (2, "good", "me", service.models[MODEL].seals.newest)
    await cut(session, 3)
    with pytest.raises(Contradiction, match="has a kept version 'good', version 2: use another name"):
        await service.versions.keep(MODEL, "good")
    with pytest.raises(InvalidInput, match="neither a number nor 'live'"):
        await service.versions.keep(MODEL, "7")
    later = await service.versions.keep(MODEL)
    listed = await service.versions.kept(MODEL)
    assert [each for each, _ in listed] == [kept, later]
    assert all(own is not None and own <= each.bytes for each, own in listed)
    with pytest.raises(NotFound) as error:
        await service.versions.release(MODEL, "2.5")
    assert error.value.detail == "; kept versions: 3, good"
    assert await service.versions.release(MODEL, "good") == kept
    assert [each for each, _ in await service.versions.kept(MODEL)] == [later]
    kinds = [event.kind for event in heard if event.kind in (EventKind.VERSION_KEPT, EventKind.VERSION_RELEASED)]
    assert kinds == [EventKind.VERSION_KEPT] * 2 + [EventKind.VERSION_RELEASED]


@in_service(keep_every_seconds=0.001, keep_last=2)
async def test_a_schedule_keeps_new_versions_and_releases_its_oldest(service: Service) -> None:
    session = await publish(service)
    named = await service.versions.keep(MODEL, "mine")
    running = asyncio.create_task(service.versions.run())
    try:
        for step in (2, 3, 4, 5):
            await cut(session, step)
            while [each.version for each, _ in await service.versions.kept(MODEL)][-1] != step:
                await asyncio.sleep(0.001)
        while len(found := [each for each, _ in await service.versions.kept(MODEL)]) > 3:
            await asyncio.sleep(0.001)
    finally:
        running.cancel()
    assert found[0] == named
    assert [each.version for each in found[1:]] == [4, 5]


@in_service(kept_retry_seconds=0.001)
async def test_the_last_listing_costs_no_reading_and_has_every_change(service: Service) -> None:
    failures = list[Event]()
    service.events.listen(lambda event: failures.append(event) if event.kind is EventKind.FAILED else None)

    session = await publish(service)
    running = asyncio.create_task(service.versions.run())
    try:
        with faults_of(service).place.replaced(names=failing(PlaceFailed("it is unreachable"))):
            while not failures:
                await asyncio.sleep(0.001)
            assert service.versions.listed() == {}, "unknown, which is not the same as none"
        while not service.versions.listed():
            await asyncio.sleep(0.001)
    finally:
        running.cancel()
    assert service.versions.listed() == {MODEL: []}
    first = await service.versions.keep(MODEL, "first")
    await cut(session, 2)
    second = await service.versions.keep(MODEL)
    assert service.versions.listed() == {MODEL: [first, second]}
    lines = kept_statuses(service.versions, 10)
    assert [(each.version, each.name, each.followers) for each in lines] == [(2, "", []), (1, "first", [])]
    assert second.seal.sealed_unix_ns == lines[0].sealed_unix_ns >= lines[1].sealed_unix_ns
    (only,) = kept_statuses(service.versions, 1)
    assert only.name == "first", "names come before others"
    await service.versions.release(MODEL, "first")
    assert service.versions.listed() == {MODEL: [second]} == {MODEL: service.models[MODEL].checkpoints.kept()}


CLOCK = SetClock()


@in_service(keep_every_seconds=5.0, keep_last=1, keep_for_seconds=3600.0, clock=CLOCK)
async def test_a_clock_that_is_wrong_for_a_while_releases_no_young_version(service: Service) -> None:
    session = await publish(service)
    for step in range(2, 8):
        CLOCK.set_ahead(7200.0 if step == 5 else 0.0)
        await cut(session, step)
        for _ in range(6):
            CLOCK.wait(1.0)
            await service.versions.look()
    assert [each.version for each, _ in await service.versions.kept(MODEL)] == [2, 3, 4, 5, 6, 7]


CANARY_CLOCK = SetClock()


@in_service(keep_every_seconds=5.0, clock=CANARY_CLOCK)
async def test_a_schedule_keeps_what_the_canary_holds(service: Service) -> None:
    """But a canary that never holds the newest version does not stop it."""
    session = await publish(service)
    canary = await service.consumers.create("canary", MODEL, Policy())
    await service.consumers.create("fleet", MODEL, Policy())
    await service.versions.keep(MODEL, "first")
    await service.following.follow_consumer("fleet", RolloutDelay("canary", 60.0), "first")
    replica = service.registry.connect(canary, "a", asyncio.Event(), "process")

    async def wait(seconds: int) -> list[int]:
        for _ in range(seconds):
            CANARY_CLOCK.wait(1.0)
            await service.histories.look()
            await service.versions.look()
        return [each.version for each, _ in await service.versions.kept(MODEL)]

    def prove() -> None:
        service.registry.acknowledge(canary, replica, service.models[MODEL].position)
        replica.checked = True

    prove()
    await cut(session, 2)
    assert await wait(8) == [1]
    await cut(session, 3)
    prove()
    assert await wait(1) == [1, 3]
    await cut(session, 4)
    assert await wait(9) == [1, 3]
    assert await wait(2) == [1, 3, 4]


@pytest.mark.parametrize(
    ("keep_last", "keep_for_seconds", "behind_seconds", "ahead", "watched", "old"),
    [
        (2, 0.0, 0.0, 0, 4.0, [1, 2]),
        (5, 0.0, 0.0, 0, 4.0, []),
        (1, 2.5, 0.0, 0, 4.0, [1]),
        (1, 9.0, 0.0, 0, 4.0, []),
        (1, 0.0, 1.25, 0, 4.0, [1]),
        (1, 2.5, 0.0, 0, 3.0, []),
        (1, 2.5, 0.0, -2, 4.0, []),
        (1, 2.5, 0.0, 7200, 4.0, [1]),
        (2, 0.0, 0.0, -7200, 4.0, [1, 2]),
    ],
)
def test_versions_of_the_schedule_are_outdated_by_number_and_age(
    tmp_path: Path,
    keep_last: int,
    keep_for_seconds: float,
    behind_seconds: float,
    ahead: int,
    watched: float,
    old: list[int],
) -> None:
    """The age counts by the wall clock, which may be wrong, and by the time that services watched the model."""
    options = ServiceOptions(data_dir=tmp_path, keep_last=keep_last, keep_for_seconds=keep_for_seconds)
    version = KeptVersion(model=MODEL, name="", id="i", seal=sealed(1), bytes=1, kept_unix_ns=0, by="me")
    kept = [
        replace(version, seal=sealed(each), kept_unix_ns=each * 10**9, watched_seconds=float(each))
        for each in (1, 2, 3, 4)
    ]
    named = replace(version, name="mine")
    now = (4 + ahead) * 10**9
    assert [each.version for each in outdated([named, *kept], options, behind_seconds, now, watched)] == old
