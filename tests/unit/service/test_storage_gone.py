"""Object storage that is gone or does not answer, while versions are kept and followed."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.controlled_storage import CALLS, ControlledStorage
from tests.support.faults import failing
from tests.support.local_service import faults_of, publish, run, send, view_of
from tests.support.wire import USER, part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.follow import BACK, LIVE, RolloutDelay
from deltasync.core.policy import Policy
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service
from deltasync.status.lag import report

MODEL = "clicks"
NAME = "storage-that-is-gone"
URL = f"controlled://{NAME}"


@pytest.fixture
def storage() -> Iterator[ControlledStorage]:
    yield ControlledStorage(NAME)
    place = Place(URL)
    if place._files.exists(place._root):
        place._files.rm(place._root, recursive=True)


async def change(session: PublishSession, step: int) -> None:
    await send(session, part(step, [(0, [step], np.full((1, USER.dim), step, "<f4"))]))
    await session.coordinator.settled()


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.001)


def connected(service: Service, name: str) -> Consumer:
    consumer = service.registry.get(name)
    service.registry.connect(consumer, "a", asyncio.Event())
    return consumer


def rows_of(service: Service, consumer: str = "") -> list[bytes]:
    tables = view_of(service, consumer).tables if consumer else service.models[MODEL].tables
    return [table.rows.tobytes() for table in tables]


async def prove(service: Service, consumer: str) -> None:
    """A replica of a consumer proves the newest version, and the service sees it."""
    canary = service.registry.get(consumer)
    replica = service.registry.connect(canary, "a", asyncio.Event(), "process")
    service.registry.acknowledge(canary, replica, service.models[MODEL].position)
    replica.checked = True
    await service.histories.look()


@asynccontextmanager
async def going_on(service: Service) -> AsyncIterator[None]:
    running = asyncio.create_task(service.following.run())
    try:
        yield
    finally:
        running.cancel()


@pytest.mark.parametrize("calls", [CALLS, ["put"], ["list"]])
@in_service(checkpoints=URL)
async def test_a_version_is_kept_in_storage_or_not_at_all(
    service: Service, storage: ControlledStorage, calls: Sequence[str]
) -> None:
    session = await publish(service)
    with storage.gone(*calls), pytest.raises(StorageFailed, match=f"{URL} cannot be reached"):
        await service.versions.keep(MODEL, "good")
    assert await service.versions.kept(MODEL) == []
    assert not list(service.options.data_dir.rglob("kept/*"))
    await change(session, 2)
    kept = await service.versions.keep(MODEL, "good")
    assert [each for each, _ in await service.versions.kept(MODEL)] == [kept]


@in_service(checkpoints=URL)
async def test_storage_that_fails_after_the_checkpoint_leaves_nothing_kept(
    service: Service, storage: ControlledStorage
) -> None:
    await publish(service)
    gone = failing(ConnectionError(f"{URL} cannot be reached"), URL, "/kept/")
    with (
        faults_of(service).place.replaced(put=gone),
        pytest.raises(StorageFailed, match=f"{URL} cannot be reached"),
    ):
        await service.versions.keep(MODEL, "good")
    assert await service.versions.kept(MODEL) == []
    assert not list(service.options.data_dir.rglob("kept/*"))
    await service.versions.keep(MODEL, "good")


@in_service(checkpoints=URL)
async def test_a_version_is_listed_once_slow_storage_has_it(service: Service, storage: ControlledStorage) -> None:
    session = await publish(service)
    with storage.silent():
        keeping = asyncio.create_task(service.versions.keep(MODEL, "good"))
        await until(storage.asked.is_set)
        await change(session, 2)
        assert not keeping.done()
        assert not list(service.options.data_dir.rglob("kept/*"))
    assert await keeping in [each for each, _ in await service.versions.kept(MODEL)]


@in_service(checkpoints=URL)
async def test_a_version_that_cannot_be_read_is_a_failure_until_it_can(
    service: Service, storage: ControlledStorage
) -> None:
    session = await publish(service)
    await service.consumers.create("ranked", MODEL, Policy(top_k=5))
    consumer = connected(service, "ranked")
    stream = consumer.replicas["a"].stream
    assert stream
    await until(lambda: view_of(service, "ranked").position.number)
    good = rows_of(service)
    await service.versions.keep(MODEL, "good")
    await change(session, 2)
    service.registry.acknowledge(consumer, consumer.replicas["a"], view_of(service, "ranked").position)
    await until(lambda: rows_of(service, "ranked") == rows_of(service))
    newest = rows_of(service)
    shutil.rmtree(service.options.data_dir / "checkpoints" / MODEL)  # As in another process.
    view = view_of(service, "ranked")
    service.registry.disconnect(consumer, consumer.replicas["a"], stream, "left", expected=True)
    await service.following.follow("ranked", "good")
    with storage.gone():
        connected(service, "ranked")
        await until(lambda: view.failure)
        lag = report(consumer, view.status(consumer.policy), time.time_ns())
        assert lag.state == "failed"
        assert lag.reason.startswith(view.failure)
        assert f"{URL} cannot be reached" in view.failure
        await change(session, 3)
        assert rows_of(service, "ranked") == newest
    await until(lambda: rows_of(service, "ranked") == good)
    await until(lambda: not view.failure)


@pytest.mark.parametrize("fault", ["gone", "silent"])
@in_service(checkpoints=URL)
async def test_a_follower_goes_on_and_back_without_storage(
    service: Service, storage: ControlledStorage, fault: str
) -> None:
    session = await publish(service)
    for name in ("canary", "fleet"):
        await service.consumers.create(name, MODEL, Policy())
    await service.versions.keep(MODEL, "one")
    consumer = connected(service, "fleet")
    await service.following.follow_consumer("fleet", RolloutDelay("canary", 0.0, BACK), "one")
    await until(lambda: view_of(service, "fleet").arrived(consumer.policy))
    one = rows_of(service, "fleet")
    await change(session, 2)
    await service.versions.keep(MODEL, "two")
    await prove(service, "canary")
    async with asyncio.timeout(10):
        with getattr(storage, fault)():
            async with going_on(service):
                await until(lambda: consumer.follows and consumer.follows.kept.version == 2)
                await until(lambda: view_of(service, "fleet").arrived(consumer.policy))
                await service.following.follow("canary", "one")
                await publish(service, model="other")
                await service.consumers.create("another", "other", Policy())
                await change(session, 3)
                await service.following.object("canary", "its AUC fell")
                await until(lambda: consumer.follows and consumer.follows.kept.version == 1)
                await until(lambda: view_of(service, "fleet").arrived(consumer.policy))
                assert rows_of(service, "fleet") == one


def test_a_consumer_that_goes_live_is_not_led_back_by_an_earlier_request(
    storage: ControlledStorage, tmp_path: Path
) -> None:
    async def keep_one(service: Service) -> None:
        await publish(service)
        await service.consumers.create("fleet", MODEL, Policy())
        await service.versions.keep(MODEL, "one")
        await service.following.follow("fleet", "one")

    async def follow_after_a_restart(service: Service) -> None:
        with storage.silent():
            earlier = asyncio.create_task(service.following.follow("fleet", "one"))
            await until(storage.asked.is_set)
            await service.following.follow("fleet", LIVE)
        with pytest.raises(Contradiction, match="was changed while the service read the kept versions: try again"):
            await earlier
        assert service.registry.get("fleet").follows is None

    for scenario in (keep_one, follow_after_a_restart):
        run(tmp_path, scenario, checkpoints=URL)
