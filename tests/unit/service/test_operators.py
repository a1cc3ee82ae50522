"""What operators ask for: pauses, quarantines, deletions, another configuration; also where it fails half way."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.faults import HeldWrites, failing, refusing
from tests.support.local_service import faults_of, join, opened, publish, send
from tests.support.log import log_of
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, publish_open, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.api.process import Reload
from deltasync.base.errors import Contradiction, ServiceUnavailable, StorageFailed
from deltasync.base.events import EventKind
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.cuts.messages import check_open
from deltasync.cuts.session import open_session
from deltasync.model.applied_tables import AppliedTables
from deltasync.service.service import Service


@pytest.mark.parametrize("error", [StorageFailed("read-only"), asyncio.CancelledError()], ids=["fails", "left"])
@in_service()
async def test_who_could_not_go_on_is_paused_after_a_restart_too(service: Service, error: BaseException) -> None:
    await publish(service)
    await service.registry.create("c", "clicks", Policy())
    await service.pauses.pause("c", "", "anna")
    await service.consumers.update("c", Policy(top_k=3))
    fails = {"put": failing(error, "view/c"), "put_all": failing(error)}
    with faults_of(service).log.replaced(**fails), pytest.raises(type(error)):
        await service.pauses.resume("c", "anna")
    after = ConsumerRegistry(service.logs, 1.0, service.events)
    assert service.registry.get("c").pause == after.get("c").pause is not None


@pytest.mark.parametrize("gone", ["first", "second"])
@in_service()
async def test_a_quarantine_goes_on_where_a_consumer_is_deleted_meanwhile(service: Service, gone: str) -> None:
    for name in ("first", "second"):
        await service.registry.create(name, "clicks", Policy())
    async with service.registry._creating:
        held = asyncio.create_task(service.registry.hold_back("clicks", 2, "row 7 has norm 1e6"))
        await asyncio.sleep(0)
        await service.consumers.delete(gone)
    await held
    after = ConsumerRegistry(service.logs, 1.0, service.events).consumers
    assert [each.pause is not None for each in after.values()] == [True]


@in_service()
async def test_a_configuration_that_was_applied_in_part_is_reported_as_such(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    consumers = tuple(ConsumerOptions(name, "clicks", Policy()) for name in ("first", "second"))
    reloading = asyncio.Event()
    reload = Reload(service.options, service.consumers, service.registry, service.limits, service.events)
    configured = replace(service.options, consumers=consumers)
    reloads = asyncio.create_task(reload.run(reloading, lambda: configured))
    with faults_of(service).log.replaced(put=refusing(StorageFailed("the log is full"), "consumer/second")):
        reloading.set()
        while "log is full" not in caplog.text:
            await asyncio.sleep(0)
    reloads.cancel()
    assert "first" in service.registry.consumers
    assert "nothing changed" not in caplog.text
    assert "only part of the configuration was applied: created: first" in caplog.text


WHY = "row 7 has norm 1e6"


async def is_held(service: Service, name: str, model: str = "clicks") -> bool:
    consumer = await service.consumers.create(name, model, Policy())
    written = ConsumerRegistry(service.logs, 1.0, service.events).get(name)
    assert written.pause == consumer.pause
    return consumer.pause is not None


async def test_a_consumer_is_held_from_its_beginning_also_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await join(service)
        assert not await is_held(service, "other", "another")
        await service.registry.hold_back("clicks", 2, WHY)
        await service.consumers.configure([ConsumerOptions("configured", "clicks", Policy(top_k=1))], "SIGHUP")
        held = service.registry.get("configured").pause
        assert held
        assert (held.by, held.why) == ("the service itself", f"version 2 is in quarantine: {WHY}")
        assert (
            service.views.get(service.registry.get("configured")) is None
        )  # A view would take the rows as they are.
        assert not await is_held(service, "third", "clicks2")
    async with opened(tmp_path) as service:
        assert await is_held(service, "late")
        await service.consumers.delete("late", "anna")
        assert await is_held(service, "late")
        await service.pauses.resume("late", "anna")
        assert await is_held(service, "later")  # Of "configured" nobody has said that it may go on.
        await service.pauses.resume("configured", "anna")
        await service.pauses.resume("later", "anna")
        assert not await is_held(service, "last")


@in_service()
async def test_a_pause_of_an_operator_keeps_no_other_consumer(service: Service) -> None:
    for name in ("mine", "theirs"):
        await service.consumers.create(name, "clicks", Policy())
    await service.registry.hold_back("clicks", 2, WHY)
    await service.pauses.resume("theirs", "anna")
    await service.pauses.pause("theirs", "a look", "anna")
    await service.pauses.resume("mine", "anna")
    assert service.registry.get("theirs").pause
    assert not await is_held(service, "late")


@in_service()
async def test_many_versions_in_quarantine_are_one_pause_and_one_event(service: Service) -> None:
    for name in ("a", "b"):
        await service.consumers.create(name, "clicks", Policy())
    await service.pauses.pause("b", "mine", "anna")
    for version in range(2, 30):
        await service.registry.hold_back("clicks", version, WHY)
    words = f"28 versions from 2 to 29 are in quarantine: {WHY}"
    assert reasons(service) == {"a": words, "b": f"{words}; mine"}
    assert service.event_counts[EventKind.CONSUMER_PAUSED] == 3  # That of anna, and each for the quarantine.


def reasons(service: Service) -> dict[str, str]:
    return {name: each.pause.why for name, each in service.registry.consumers.items() if each.pause}


@in_service()
async def test_with_a_model_its_quarantine_goes(service: Service) -> None:
    (await publish(service)).end("it has ended")
    await service.registry.hold_back("clicks", 2, WHY)
    await service.removals.delete_model("clicks", "anna")
    assert not await is_held(service, "late")


ROWS = random_rows(0)


@in_service()
async def test_a_table_of_a_model_whose_last_cut_was_too_large_is_deleted(service: Service) -> None:
    (await publish(service)).end("it has gone")
    coordinator = service.models.coordinators["clicks"]
    coordinator.report_failed("a cut is too large for the log", Contradiction("too large"))
    await service.removals.delete_table("clicks", ITEM.name, "a test")
    assert [table.spec.name for table in service.models["clicks"].tables] == [USER.name]


@in_service(deletion_seconds=0.01)
async def test_a_deletion_does_not_wait_for_a_cut_that_cannot_be_applied(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    session = await join(service)
    await send(session, full_part(1, ROWS, WHOLE))
    await service.models.coordinators["clicks"].settled()
    monkeypatch.setattr(AppliedTables, "apply", fails)
    answer = asyncio.create_task(send(session, part(2, [(0, [7], np.full((1, 4), 2, "<f4"))])))
    while not session.coordinator.model.failure:
        await asyncio.sleep(0)
    session.end("it has gone")
    with pytest.raises(ServiceUnavailable, match="is busy with cuts: version 2 could not be applied"):
        await service.removals.delete_table("clicks", ITEM.name, "a test")
    assert not answer.done()
    assert await service.publishing.open("clicks") is service.models.coordinators["clicks"]


@in_service()
async def test_a_rank_that_joins_while_its_model_is_deleted_publishes_nothing(
    service: Service, tmp_path: Path
) -> None:
    """Else the log would have versions of a model that is no more, for the next one of its name."""
    noting = HeldWrites("removed/clicks")
    (await publish(service)).end("it has gone")
    await service.checkpoints.make("clicks")
    opening = check_open(publish_open(run="run-2", started=2).open)
    coordinator = await service.publishing.open("clicks")
    faults_of(service).log.hooks["put"] = noting
    deletion = asyncio.create_task(service.removals.delete_model("clicks", "a test"))
    await noting.has_begun()
    session = await open_session(coordinator, opening)
    noting.let_go()
    await deletion
    with pytest.raises(ServiceUnavailable, match="has just been deleted; reconnect"):
        await send(session, full_part(5, ROWS, WHOLE))
    assert log_of(service).streams() == []
    assert not [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
