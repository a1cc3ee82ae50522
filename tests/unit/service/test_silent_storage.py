"""Storage that accepts and never answers, refuses, or alters what it gets: nobody waits, and no copy counts."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.controlled_storage import ControlledStorage
from tests.support.local_service import backups, opened, publish, send, sources, view_of
from tests.support.log import held_up, log_of
from tests.support.wire import part

from deltasync.base.errors import StorageFailed
from deltasync.base.events import Event, EventKind
from deltasync.checkpoints.store import NotCopied
from deltasync.consumers.follow import LIVE, RolloutDelay
from deltasync.core.policy import Policy
from deltasync.cuts.session import PublishSession
from deltasync.service.rollback import roll_back
from deltasync.service.service import Service
from deltasync.status.answers import Answers, Sampler

MODEL = "clicks"
# More than asyncio's threads on any machine that runs the tests.
MANY = 40


@pytest.fixture
def storage() -> ControlledStorage:
    return ControlledStorage(uuid.uuid4().hex)


async def cut(session: PublishSession, step: int) -> None:
    await send(session, part(step, [(0, [step], np.full((1, 4), step, np.float32))]))
    await session.coordinator.settled()


def connect(service: Service, consumer: str) -> None:
    service.registry.connect(service.registry.get(consumer), "a", asyncio.Event())


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def scenario(tmp_path: Path, work: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(40), opened(tmp_path / "data", **settings) as service:
            await work(service)

    asyncio.run(main())


@asynccontextmanager
async def in_background(*works: Awaitable[Any]) -> AsyncIterator[None]:
    """Let requests wait while the block runs, and cancel them."""
    waiting = [asyncio.ensure_future(each) for each in works]
    try:
        yield
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def test_nothing_else_waits_for_silent_storage(tmp_path: Path, storage: ControlledStorage) -> None:
    """Neither cuts, views, consumers of any kind, lags and metrics, nor what is read from memory."""

    async def work(service: Service) -> None:
        session = await publish(service)
        await service.consumers.create("ranked", MODEL, Policy(top_k=5))
        connect(service, "ranked")
        await until(lambda: view_of(service, "ranked").position.number)
        for name in ("old", "one"):
            await service.versions.keep(MODEL, name)
        await cut(session, 2)
        await service.versions.keep(MODEL, "two")
        await service.consumers.create("fleet", MODEL, Policy())
        await service.following.follow("fleet", "two")
        answers, sampler = Answers(sources(service)), Sampler(sources(service), service.events)
        with ExitStack() as stack:
            stack.enter_context(storage.silent())
            requests = [
                *(service.checkpoints.make(MODEL) for _ in range(MANY)),
                *(service.versions.keep(MODEL, f"late-{each}") for each in range(MANY)),
                *(backups(service).make(f"{storage.url}/{each}", "me") for each in range(MANY)),
                service.versions.release(MODEL, "old"),
            ]
            async with in_background(*requests):
                await until(storage.asked.is_set)
                ranked, before = service.registry.get("ranked"), view_of(service, "ranked").position
                service.registry.acknowledge(ranked, ranked.replicas["a"], before)
                for step in (3, 4):
                    await cut(session, step)
                await until(lambda: view_of(service, "ranked").position.number > before.number)
                assert (await answers.consumer("ranked")).state
                assert len(await answers.consumers()) == 2
                assert b"deltasync_model_kept_versions" in await answers.metrics()
                assert (await sampler.look()).kept
                assert [each.name for each, _ in await service.versions.kept(MODEL)] == ["one", "two"]
                await service.consumers.create("new", MODEL, Policy(top_k=2))
                connect(service, "new")
                await until(lambda: view_of(service, "new").position.number)
                await service.following.follow("fleet", "two")
                await service.following.follow("fleet", LIVE)
                await service.following.follow_consumer("fleet", RolloutDelay("ranked", 0.0), "one")
                await publish(service, model="other")
                position = await roll_back(service.models, MODEL, "two", service.events, "me")
                assert position.number == 5

    scenario(tmp_path, work, checkpoints=storage.url)


def test_nothing_else_waits_for_a_log_that_takes_no_writes(tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await publish(service)
        names = [f"ranked-{each}" for each in range(MANY)]
        for name in names:
            await service.consumers.create(name, MODEL, Policy(top_k=5))
        with held_up(log_of(service)):
            before = log_of(service).queue.bytes
            for name in names:
                connect(service, name)
            await until(lambda: log_of(service).queue.bytes > before)
            answers = Answers(sources(service))
            for _ in range(20):
                assert len(await answers.consumers()) == MANY
            assert b"deltasync_head_version" in await answers.metrics()
        await until(lambda: all(view_of(service, each).position.number for each in names))

    scenario(tmp_path, work)


def test_a_call_beyond_its_deadline_fails_and_later_ones_fail_at_once(
    tmp_path: Path, storage: ControlledStorage
) -> None:
    async def work(service: Service) -> None:
        heard = list[Event]()
        service.events.listen(heard.append)
        running = asyncio.create_task(service.checkpoints.run())
        session = await publish(service)
        with storage.silent():
            with pytest.raises(NotCopied, match=f"{storage.url} has not answered for"):
                await service.checkpoints.make(MODEL)
            asked = storage.calls.total()
            for _ in range(3):
                await cut(session, asked + _)
                with pytest.raises(NotCopied, match=f"{storage.url} has not answered for"):
                    await service.checkpoints.make(MODEL)
            with pytest.raises(StorageFailed, match=f"{storage.url} has not answered for"):
                await service.versions.kept(MODEL)
            assert storage.calls.total() == asked, "nothing more waits for it"
            await until(lambda: EventKind.STORAGE_SILENT in {each.kind for each in heard})
            assert f"{storage.url} has not answered for" in service.checkpoints.troubles[0]
        await until(lambda: EventKind.STORAGE_ANSWERS in {each.kind for each in heard})
        newest = await service.checkpoints.make(MODEL)
        assert service.models[MODEL].checkpoints.copied_version == newest.version
        running.cancel()

    scenario(tmp_path, work, checkpoints=storage.url, storage_seconds=0.05)


def test_a_service_ends_while_storage_is_silent(tmp_path: Path, storage: ControlledStorage) -> None:
    async def work(service: Service) -> None:
        await publish(service)
        copying = asyncio.create_task(service.checkpoints.make(MODEL))
        await until(storage.asked.is_set)
        service.draining.set()
        copying.cancel()
        await asyncio.wait({copying})

    with storage.silent():
        scenario(tmp_path, work, checkpoints=storage.url)


def test_a_model_is_deleted_and_published_again_without_storage(
    tmp_path: Path, storage: ControlledStorage
) -> None:
    async def work(service: Service) -> None:
        session = await publish(service)
        await service.checkpoints.make(MODEL)
        session.end("done")
        await until(lambda: not service.models.coordinators[MODEL].connected)
        with storage.silent():
            deleting = asyncio.create_task(service.removals.delete_model(MODEL, "me"))
            await until(storage.asked.is_set)
            async with in_background(again := asyncio.create_task(publish(service, run="again", started=2))):
                await publish(service, model="other")
                await service.consumers.create("new", "other", Policy(top_k=2))
                assert not again.done(), "it waits until everything of the deleted one is gone"
        await deleting
        await publish(service, run="again", started=3)
        assert (await service.checkpoints.make(MODEL)).version == 1

    scenario(tmp_path, work, checkpoints=storage.url)


def test_a_checkpoint_is_complete_though_old_ones_cannot_be_removed(
    tmp_path: Path, storage: ControlledStorage
) -> None:
    async def work(service: Service) -> None:
        heard = list[Event]()
        service.events.listen(heard.append)
        session = await publish(service)
        storage.refused = {"remove"}
        for step in range(2, 7):
            await cut(session, step)
            made = await service.checkpoints.make(MODEL)
        assert service.models[MODEL].checkpoints.copied_version == made.version == 6
        assert service.checkpoints.failure(MODEL) == ""
        (trouble,) = service.checkpoints.troubles
        assert "old checkpoints could not be removed" in trouble
        assert storage.url in trouble
        assert any("old checkpoints could not be removed" in each.text for each in heard)
        assert service.checkpoints.failures == 0
        storage.refused.clear()
        await cut(session, 7)
        await service.checkpoints.make(MODEL)
        assert service.checkpoints.troubles == []

    scenario(tmp_path, work, checkpoints=storage.url)


# What storage alters.


@pytest.fixture(params=["longer", "other bytes"])
def altering(storage: ControlledStorage, request: pytest.FixtureRequest) -> ControlledStorage:
    if request.param == "longer":
        storage.alter = lambda content: b"%x\r\n" % len(content) + content
    else:
        storage.alter = lambda content: content[:-1] + bytes([content[-1] ^ 1])
        storage.details = etag
    return storage


def etag(content: bytes) -> dict[str, Any]:
    return {"ETag": f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'}


def test_what_storage_alters_is_no_copy(tmp_path: Path, altering: ControlledStorage) -> None:
    async def work(service: Service) -> None:
        session = await publish(service)
        for step in (2, 3):
            with pytest.raises(NotCopied, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required") as raised:
                await service.checkpoints.make(MODEL)
            assert "were written" in str(raised.value)
            await cut(session, step)
        answers = Answers(sources(service))
        assert b'deltasync_checkpoint_copied_version{model="clicks"} 0.0' in await answers.metrics()
        await service.consumers.create("fleet", MODEL, Policy())
        assert "no copy is complete there" in (await answers.consumer("fleet")).reason
        assert service.models[MODEL].checkpoints.copied_version == 0
        altering.alter = lambda content: content
        assert (await service.checkpoints.make(MODEL)).version == 3
        assert service.models[MODEL].checkpoints.copied_version == 3
        assert service.models[MODEL].checkpoints.verify() == []

    scenario(tmp_path, work, checkpoints=altering.url)


def test_etags_that_are_no_checksums_are_no_error(tmp_path: Path, storage: ControlledStorage) -> None:
    """Those of encrypted objects: the first object is read again, others are not."""
    storage.details = lambda _: {"ETag": f'"{uuid.uuid4().hex}"'}

    async def work(service: Service) -> None:
        session = await publish(service)
        await service.checkpoints.make(MODEL)
        await cut(session, 2)
        assert (await service.checkpoints.make(MODEL)).version == 2
        assert storage.calls["get"] <= 1 + 2 * 3, "and manifests, to remove old ones"

    scenario(tmp_path, work, checkpoints=storage.url)
