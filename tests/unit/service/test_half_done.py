"""What an operator asks for and what fails half way: it is said, and a restart finds no other state."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from tests.support.local_service import publish
from tests.unit.support.async_tests import in_service

from deltasync.api.reload import Reloaded, reload_on
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.errors import StorageFailed
from deltasync.core.limits import LimitOptions
from deltasync.core.policy import Policy
from deltasync.service.brake import Brake
from deltasync.service.service import Service
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.views.registry import ViewRegistry


@pytest.mark.parametrize("error", [StorageFailed("read-only"), asyncio.CancelledError()], ids=["fails", "left"])
@in_service()
async def test_who_could_not_go_on_is_paused_after_a_restart_too(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def fails(*_: Any) -> None:
        raise error

    await publish(service)
    await service.registry.create("c", "clicks", Policy())
    await Brake(service).pull("c", "", "anna")
    await service.update_consumer("c", Policy(top_k=3))
    with monkeypatch.context() as patch:
        patch.setattr(ViewRegistry, "begin", fails)
        with pytest.raises(type(error)):
            await Brake(service).release("c", "anna")
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
        await service.delete_consumer(gone)
    await held
    after = ConsumerRegistry(service.logs, 1.0, service.events).consumers
    assert [each.pause is not None for each in after.values()] == [True]


@in_service()
async def test_a_configuration_that_is_taken_over_in_part_is_not_said_to_change_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = LmdbStore.put

    def full(log: LmdbStore, name: str, *arguments: Any, **fields: Any) -> Future[None]:
        if name == "consumer/second":
            raise StorageFailed("the log is full")
        return put(log, name, *arguments, **fields)

    consumers = tuple(ConsumerOptions(name, "clicks", Policy()) for name in ("first", "second"))
    reloading = asyncio.Event()
    reloads = asyncio.create_task(reload_on(reloading, service, lambda: Reloaded(consumers, LimitOptions())))
    monkeypatch.setattr(LmdbStore, "put", full)
    reloading.set()
    while "log is full" not in caplog.text:
        await asyncio.sleep(0)
    monkeypatch.undo()
    reloads.cancel()
    assert "first" in service.registry.consumers
    assert "nothing has changed" not in caplog.text
    assert "the configuration is taken over in part: made: first" in caplog.text
