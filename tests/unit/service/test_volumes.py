"""Who meets a volume that refuses writes, and who says so; and what a slow one keeps waiting."""

import asyncio

import numpy as np
import pytest
from tests.support.local_service import join, publish, send, sources, view_of
from tests.support.log import Heads, held_up, log_of
from tests.support.releases import frozen
from tests.support.wire import part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import StorageFailed
from deltasync.base.events import EventKind
from deltasync.client import Policy
from deltasync.core.position import Position
from deltasync.core.table_memory import TableMemory
from deltasync.log.volume import refused
from deltasync.service.service import Service
from deltasync.status.answers import Answers, Sampler
from deltasync.status.process import checks, not_ready
from deltasync.views.decision import ReleaseOptions


def no_memory(_: TableMemory, nbytes: int, what: str) -> None:
    raise StorageFailed(f"no room for {what}: it takes {nbytes} bytes, and 0 bytes of memory are free")


@in_service(releases=ReleaseOptions(retry_seconds=0.001))
async def test_no_room_for_the_tables_of_a_view_keeps_back_its_consumer_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await publish(service)
    consumer = await service.consumers.create("top", "clicks", Policy(top_k=3))
    with monkeypatch.context() as patch:
        patch.setattr(TableMemory, "check", no_memory)
        service.registry.connect(consumer, "p", asyncio.Event())
        view = view_of(service, "top")
        while not view.trouble:
            await asyncio.sleep(0.001)
        lag = await Answers(sources(service)).consumer("top")
        assert "no room for table" in lag.reason
        await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
        await session.coordinator.settled()
        assert service.models["clicks"].position.number == 2
        assert not service.volumes.trouble
    while not view.position.number:
        await asyncio.sleep(0.001)
    assert not view.trouble


@in_service()
async def test_a_consumer_without_replicas_says_too_that_nothing_new_can_come(service: Service) -> None:
    await service.consumers.create("early", "clicks", Policy())
    file = service.options.data_dir / "log" / "data.mdb"
    service.volumes.record(refused("the log could not be written", file, OSError(28, "No space left on device")))
    lag = await Answers(sources(service)).consumer("early")
    assert lag.state == "empty"
    assert "on volume 'log': No space left on device" in lag.reason
    await service.volumes.look_after()
    assert not service.volumes.trouble
    counts = service.event_counts
    assert (counts[EventKind.VOLUME_FAILED], counts[EventKind.VOLUME_RECOVERED]) == (1, 1)


@in_service()
async def test_while_the_disk_is_slow_the_event_loop_goes_on(service: Service) -> None:
    """Streams are answered, lag is told, consumers read what there is: only who waits for the disk waits."""
    await publish(service)
    session, model = await join(service), service.models["clicks"]
    consumer = await service.consumers.create("all", "clicks", Policy())
    replica = service.registry.connect(consumer, "p", asyncio.Event())
    with held_up(log_of(service)):
        sealing = asyncio.create_task(send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))])))
        release = frozen(await model.release(0))
        assert release.head
        assert release.head.number == 1
        service.registry.acknowledge(consumer, replica, Position(model.history, 1))
        assert (await Answers(sources(service)).consumer("all")).head == 1
        assert b"deltasync_log_commit_seconds_count" in await Answers(sources(service)).metrics()
        assert not sealing.done()
    position = await sealing
    assert position
    assert position.number == 2


@in_service()
async def test_commits_are_counted(service: Service) -> None:
    before = sum(log_of(service).commits.read()[0])
    await publish(service)
    assert sum(log_of(service).commits.read()[0]) > before


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Heads:
    return Heads(monkeypatch)


@in_service()
async def test_a_log_that_can_be_neither_written_nor_read_is_reported(service: Service, heads: Heads) -> None:
    answers = Answers(sources(service))
    await publish(service)
    for name, policy in {"all": Policy(), "top": Policy(top_k=3)}.items():
        consumer = await service.consumers.create(name, "clicks", policy)
        service.registry.connect(consumer, "p", asyncio.Event())
    while not view_of(service, "top").position.number:
        await asyncio.sleep(0.001)
    heads.refused, heads.opened = True, False
    with pytest.raises(StorageFailed, match="Input/output error"):
        await asyncio.wrap_future(log_of(service).put("x", b""))
    await service.volumes.look_after()
    assert "look for errors of the device in the system log" in not_ready(checks(sources(service)))
    overview = await Sampler(sources(service), service.events).look()
    (process,) = overview.processes
    assert (process.ready, [each.state for each in overview.consumers]) == (False, ["failed", "failed"])
    assert b'deltasync_volume_failed{volume="log"} 1.0' in await answers.metrics()
    for name in ("all", "top"):
        lag = await answers.consumer(name)
        assert (lag.state, "look for errors of the device" in lag.reason) == ("failed", True)
    heads.refused, heads.opened = False, True
    await service.volumes.look_after()
    assert not not_ready(checks(sources(service)))
    overview = await Sampler(sources(service), service.events).look()
    assert overview.processes[0].ready
    assert "failed" not in {each.state for each in overview.consumers}
