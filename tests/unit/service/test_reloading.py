"""A model whose rows do not fit their digests in memory: nothing of it is sent, and it comes back whole."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from tests.support.faults import Held, HeldWrites, failing
from tests.support.local_service import check, faults_of, join, publish, send, sources
from tests.support.releases import frozen, live_rows
from tests.support.wire import USER, part, random_rows
from tests.unit.service.test_checkpoints import Process, cut, in_processes, same
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable, StorageFailed
from deltasync.base.events import Event, EventKind
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import DamagedRows
from deltasync.core.stamped_table import StampedTable
from deltasync.model.model import Model
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.overview import consumer_statuses, model_statuses
from deltasync.status.process import checks, not_ready

ROWS = random_rows(1)  # Those of `publish`.


@asynccontextmanager
async def kept(service: Service) -> AsyncIterator[None]:
    """While housekeeping goes on."""
    keeper = asyncio.create_task(service.run())
    yield
    keeper.cancel()
    with suppress(asyncio.CancelledError):
        await keeper


def flip(table: StampedTable, *rows: int) -> None:
    """Change a bit of each of these rows behind the service's back."""
    table.rows.view(np.uint8)[list(rows), 1] ^= 16


def said(service: Service, *kinds: EventKind) -> list[Event]:
    """The events of these kinds from here on."""
    found: list[Event] = []
    listeners = service.events._listeners
    service.events._listeners = (*listeners, lambda each: found.append(each) if each.kind in kinds else None)
    return found


async def reloaded(service: Service, before: Model) -> Model:
    """The model of the same name that has come in place of another one."""
    while (model := service.models.get(before.name)) in (None, before):
        await service.models.added.changed()
    assert model
    return model


async def change(service: Service, session: Any, version: int, rows: list[int]) -> Position:
    """Publish a version, in which these rows are the version; it is applied once this returns."""
    position = await send(session, part(version, [(0, rows, np.full((len(rows), USER.dim), version, "<f4"))]))
    await service.models.coordinators["clicks"].settled()
    assert position
    return position


async def by_a_release(service: Service) -> None:
    with pytest.raises(DamagedRows, match="bits have changed in rows 3 to 4"):
        await service.models["clicks"].release(0)


async def by_a_checkpoint(service: Service) -> None:
    with pytest.raises(DamagedRows):
        await service.checkpoints.make("clicks")


async def by_fsck(service: Service) -> None:
    found = await check(service)
    assert "rows 3 to 4: the service reloads the model" in found[0].problems[0]


async def by_a_view(service: Service) -> None:
    consumer = await service.consumers.create("top", "clicks", Policy(top_k=5))
    service.registry.connect(consumer, "replica", asyncio.Event())


@pytest.mark.parametrize("find", [by_a_release, by_a_checkpoint, by_fsck, by_a_view])
@pytest.mark.parametrize("checkpoints", [[], [1], [1, 2]], ids=["log", "checkpoint and log", "checkpoint"])
@in_service()
async def test_wherever_damage_is_found_it_is_reloaded(
    service: Service, find: Any, checkpoints: list[int]
) -> None:
    session = await publish(service)
    consumer = await service.consumers.create("plain", "clicks", Policy())
    replica = service.registry.connect(consumer, "replica", asyncio.Event())
    service.registry.acknowledge(consumer, replica, Position(service.models["clicks"].history, 1))
    if 1 in checkpoints:
        await service.checkpoints.make("clicks")
    await change(service, session, 2, [7, 8])
    if 2 in checkpoints:
        await service.checkpoints.make("clicks")
    await change(service, session, 3, [3, 4, 9])  # A checkpoint reads no others.
    model, events = service.models["clicks"], said(service, EventKind.ROWS_DAMAGED, EventKind.MODEL_RELOADED)
    position, checksum = model.position, model.tables[0].checksum
    flip(model.tables[0], 3, 4)
    async with kept(service):
        await find(service)
        model = await reloaded(service, model)
    release = frozen(await model.release(0))
    expected = ROWS[0].copy()
    expected[[7, 8]], expected[[3, 4, 9]] = 2, 3
    assert live_rows(release)[0].values.tobytes() == expected.tobytes()
    assert (model.position, release.checksums[0], model.tables.failed) == (position, checksum, "")
    assert service.registry.get("plain").replicas["replica"].applied.number == 1
    await asyncio.sleep(0)
    assert [each.kind for each in events] == [EventKind.ROWS_DAMAGED, EventKind.MODEL_RELOADED]
    assert "rows 3 to 4" in events[0].text


@in_service()
async def test_nothing_of_it_is_sent_meanwhile_and_everybody_is_told_why(service: Service) -> None:
    session = await publish(service)
    await service.consumers.create("plain", "clicks", Policy())
    model, answers, hooks = service.models["clicks"], Answers(sources(service)), faults_of(service).log.hooks
    hooks["items"] = failing(StorageFailed("the checkpoint is on a broken disk"), "cut/clicks")
    flip(model.tables[0], 3)
    async with kept(service):
        with pytest.raises(DamagedRows):
            await model.release(0)
        with pytest.raises(ServiceUnavailable, match=r"is being reloaded .* in row 3"):
            service.models.model("clicks")
        while "broken disk" not in service.models.reload_reason("clicks"):
            await asyncio.sleep(0)
        reason = "in row 3; the reload failed and will be retried: the checkpoint is on a broken disk"
        assert reason in not_ready(checks(sources(service)))
        assert reason in model_statuses(service.models)[0].trouble
        (consumer,) = consumer_statuses(service.models, service.registry, [])
        assert (consumer.state, reason in consumer.reason) == ("failed", True)
        for asked in (
            answers.consumer("plain"),
            service.publishing.open("clicks"),
            service.consumers.delete("plain"),
        ):
            with pytest.raises(ServiceUnavailable, match="in row 3; the reload failed"):
                await asked
        assert b'deltasync_model_failed{model="clicks"} 1' in await answers.metrics()
        with pytest.raises(ServiceUnavailable, match="is being reloaded; try again"):
            await change(service, session, 2, [7])
        hooks["items"] = failing(PlaceFailed("the checkpoints are away"), "cut/clicks")
        while "will be retried: the checkpoint is on a broken disk; the checkpoints are away" not in (
            model_statuses(service.models)[0].trouble
        ):
            await asyncio.sleep(0.001)
        assert "; the checkpoints are away" in not_ready(checks(sources(service)))
        del hooks["items"]
        model = await reloaded(service, model)
        while service.models.reloading:
            await asyncio.sleep(0)
    assert not not_ready(checks(sources(service)))
    session = await join(service, continues=model.position)
    assert (await change(service, session, 2, [7])).number == 2
    assert live_rows(await model.release(1))[0].ids.tolist() == [7]


@in_service()
async def test_a_cut_that_is_sealed_as_damage_is_found_is_not_lost(service: Service) -> None:
    session = await publish(service)
    model = service.models["clicks"]
    flip(model.tables[0], 3)
    async with kept(service):
        with pytest.raises(DamagedRows):
            await model.release(0)
        with suppress(ServiceUnavailable):  # Or it was too late for it.
            await send(session, part(2, [(0, [7], np.full((1, USER.dim), 2, "<f4"))]))
        model = await reloaded(service, model)
    assert model.position.number == model.seals.newest_version
    values = live_rows(await model.release(0))[0].values
    assert values[7].tolist() == ([2] * USER.dim if model.position.number == 2 else ROWS[0][7].tolist())


@in_service()
async def test_rows_that_the_log_has_damaged_come_from_the_trainer(service: Service) -> None:
    """Else the model would be reloaded again and again."""
    session = await publish(service)
    await change(service, session, 2, [7, 8])
    model, failed = service.models["clicks"], said(service, EventKind.FAILED)
    (record,) = model.log.read("cuts/clicks", 2, 2)
    payload = bytearray(record.payload)
    payload[-1] ^= 1
    await asyncio.wrap_future(model.log.append("cuts/clicks", 2, record.part, record.index, bytes(payload)))
    flip(model.tables[0], 7)
    async with kept(service):
        with pytest.raises(DamagedRows):
            await model.release(1)
        model = await reloaded(service, model)
    assert (model.position.number, model.tables.failed) == (1, "")
    assert any("version 2 of model 'clicks' is damaged" in each.text for each in failed)
    session = await join(service, continues=model.position)
    assert (await change(service, session, 2, [7, 8])).number == 2


async def let_go_once_cancelled(held: Held) -> None:
    """Once a reload is cancelled; what its thread reads cannot be, and its end waits for that."""
    while not any(each.cancelling() for each in asyncio.all_tasks() if "_reload" in repr(each.get_coro())):
        await asyncio.sleep(0)
    held.let_go()


@in_service()
async def test_a_service_ends_while_a_model_is_reloaded(service: Service) -> None:
    await publish(service)
    model, recovering = service.models["clicks"], Held("cut/clicks")
    faults_of(service).log.hooks["items"] = recovering
    flip(model.tables[0], 3)
    async with kept(service):
        with pytest.raises(DamagedRows):
            await model.release(0)
        await recovering.has_begun()
        letting_go = asyncio.create_task(let_go_once_cancelled(recovering))
    await service.reloading.end()  # As the service's end does.
    await letting_go


@in_processes()
async def test_another_process_can_take_a_model_that_its_owner_has_reloaded(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    await cut(session, 2, 7)
    model, rows = a.service.models["clicks"], a.rows
    flip(model.tables[0], 3)
    async with kept(a.service):
        with pytest.raises(DamagedRows):
            await model.release(0)
        await reloaded(a.service, model)
    assert same(a.rows, rows)
    await a.give_up()
    await b.take()
    assert (same(b.rows, rows), b.version) == (True, 2)


@in_service()
async def test_a_reload_that_is_given_up_before_it_begins_leaves_nothing(service: Service) -> None:
    await publish(service)
    model = service.models["clicks"]
    flip(model.tables[0], 3)
    with pytest.raises(DamagedRows):
        await model.release(0)
    await service.reloading.watch(model)
    await service.reloading.give_up("clicks")
    assert service.models.reloading == {}


@in_processes()
async def test_a_model_that_is_being_reloaded_goes_to_another_process(a: Process, b: Process) -> None:
    await a.take()
    await publish(a.service)
    model, rows, recovering = a.service.models["clicks"], a.rows, Held("cut/clicks")
    flip(model.tables[0], 3)
    a.logs.faults.log.hooks["items"] = recovering
    async with kept(a.service):
        with pytest.raises(DamagedRows):
            await model.release(0)
        await recovering.has_begun()
        giving_up = asyncio.create_task(a.give_up())
        await let_go_once_cancelled(recovering)
        await giving_up
    assert not [*a.service.models.reloading, *a.service.models.recovering, *a.service.models]
    await b.take()
    assert same(b.rows, rows)


async def begin_to_reload(service: Service) -> None:
    model = service.models["clicks"]
    flip(model.tables[0], 3)
    with pytest.raises(DamagedRows):
        await model.release(0)
    await service.reloading.watch(model)
    assert "clicks" in service.models.reloading


async def reloads_ended(service: Service) -> None:
    while service.models.reloading:
        await asyncio.sleep(0.001)
    assert not [*service.models, *service.models.recovering]


@in_service()
async def test_a_reload_that_begins_while_its_model_is_deleted_ends(service: Service) -> None:
    noting = faults_of(service).log.hooks["put"] = HeldWrites("removed/clicks")
    (await publish(service)).end("it has gone")
    deletion = asyncio.create_task(service.removals.delete_model("clicks", "a test"))
    await noting.has_begun()
    await begin_to_reload(service)
    noting.let_go()
    await deletion
    await asyncio.wait_for(reloads_ended(service), 5)


@in_processes()
async def test_a_reload_that_begins_while_its_model_is_given_up_ends(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving_up, give_up = asyncio.Event(), a.service.reloading.give_up

    async def noted(model: str) -> None:
        await give_up(model)
        giving_up.set()

    monkeypatch.setattr(a.service.reloading, "give_up", noted)
    await a.take()
    await publish(a.service)
    rows = a.rows
    async with a.service.models.changing:
        given_up = asyncio.create_task(a.give_up())
        await giving_up.wait()
        await begin_to_reload(a.service)
    await given_up
    await asyncio.wait_for(reloads_ended(a.service), 5)
    await b.take()
    assert same(b.rows, rows)
