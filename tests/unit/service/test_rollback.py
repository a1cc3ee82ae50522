"""A rollback that fails leaves the model as it was, and one that is cancelled is done or not."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from tests.support.faults import HeldWrites, failing, refusing
from tests.support.local_service import faults_of, join, publish, send
from tests.support.wire import USER, close, delete_chunk, part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable, StorageFailed, Superseded
from deltasync.base.events import Event, EventKind
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.core.policy import Policy
from deltasync.service.rollback import roll_back
from deltasync.service.service import Service

MODEL = "clicks"


def rows_of(service: Service) -> list[bytes]:
    return [table.rows.tobytes() for table in service.models[MODEL].tables]


@in_service()
async def test_a_version_that_cannot_be_read_stops_no_trainer(service: Service) -> None:
    session = await publish(service)
    kept = await service.versions.keep(MODEL)
    await send(session, part(2, [(0, [1], np.ones((1, 4), np.float32))]))

    gone = failing(PlaceFailed("the disk is gone"))
    with (
        faults_of(service).place.replaced(get=gone, open=gone),
        pytest.raises(StorageFailed, match="the disk is gone"),
    ):
        await roll_back(service.models, MODEL, str(kept.version), service.events, "me")
    position = await send(session, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    assert position is not None
    assert position.number == 3


@in_service()
async def test_after_a_rollback_that_was_not_sealed_the_run_goes_on(service: Service) -> None:
    session = await publish(service)
    kept = await service.versions.keep(MODEL)
    await send(session, part(2, [(0, [1], np.ones((1, 4), np.float32))]))
    await session.coordinator.settled()
    before = rows_of(service)
    full = refusing(StorageFailed("the disk is full"), f"seals/{MODEL}")
    with faults_of(service).log.replaced(append=full), pytest.raises(StorageFailed, match="the disk is full"):
        await roll_back(service.models, MODEL, str(kept.version), service.events, "me")
    assert rows_of(service) == before
    with pytest.raises(Superseded):
        await send(session, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    again = await join(service, continues=service.models[MODEL].position)
    position = await send(again, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    assert position is not None
    assert position.number == 3


async def published(service: Service, **fields: Any) -> str:
    """Publish version 1, keep it, and publish version 2. Returns the kept version."""
    session = await publish(service, **fields)
    kept = await service.versions.keep(MODEL)
    await send(session, part(2, [(0, [1], np.ones((1, 4), np.float32))]))
    await session.coordinator.settled()
    return str(kept.version)


async def goes_on(service: Service) -> None:
    """Check that the run before the rollback publishes the next version."""
    again = await join(service, continues=service.models[MODEL].position)
    position = await send(again, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    assert position is not None
    assert position.number == 3


@in_service()
async def test_of_two_rollbacks_at_once_that_fail_none_remains(service: Service) -> None:
    version = await published(service)
    full = refusing(StorageFailed("the disk is full"), f"seals/{MODEL}")
    with faults_of(service).log.replaced(append=full):
        both = (roll_back(service.models, MODEL, version, service.events, by) for by in ("me", "you"))
        results = await asyncio.gather(*both, return_exceptions=True)
    assert [str(each) for each in results] == ["the disk is full"] * 2
    await goes_on(service)


@in_service()
async def test_a_trainer_is_not_refused_for_good_before_the_rollback_is_sealed(service: Service) -> None:
    version, seals = await published(service), HeldWrites(f"seals/{MODEL}")
    with faults_of(service).log.replaced(append=seals):
        rolling_back = asyncio.create_task(roll_back(service.models, MODEL, version, service.events, "me"))
        await seals.has_begun()
        with pytest.raises(ServiceUnavailable) as refused:
            await join(service, continues=service.models[MODEL].position)
        assert "the model is being rolled back to version 1" in refused.value.detail
        seals.error = StorageFailed("the disk is full")
        seals.let_go()
        with pytest.raises(StorageFailed):
            await rolling_back
    await goes_on(service)


@pytest.mark.parametrize("fails", [False, True])
@in_service()
async def test_a_rollback_goes_on_if_the_operator_hangs_up(service: Service, fails: bool) -> None:
    version, rolled_back, seals = await published(service), list[object](), HeldWrites(f"seals/{MODEL}")

    def listen(event: Event) -> None:
        if event.kind is EventKind.MODEL_ROLLED_BACK:
            rolled_back.append(event.subject["version"])

    service.events.listen(listen)
    with faults_of(service).log.replaced(append=seals):
        rolling_back = asyncio.create_task(roll_back(service.models, MODEL, version, service.events, "me"))
        await seals.has_begun()
        rolling_back.cancel()
        await asyncio.wait([rolling_back])
        seals.error = StorageFailed("the disk is full") if fails else None
        seals.let_go()
        coordinator = service.models.coordinators[MODEL]
        async with coordinator.rolling_back:
            pass
    await asyncio.sleep(0)
    if fails:
        assert rolled_back == []
        await goes_on(service)
    else:
        assert rolled_back == [3]
        assert service.models[MODEL].seals.newest_version == 3


@in_service()
async def test_a_clock_that_was_set_back_refuses_no_rollback(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, now = await published(service, started=time.time_ns()), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
    position = await roll_back(service.models, MODEL, version, service.events, "me")
    assert position.number == 3


@in_service()
async def test_the_name_of_a_run_makes_no_rollback(service: Service) -> None:
    await publish(service)
    await publish(service, 2, run="rollback-to-1-0a1b2c3d", started=2)
    newest = service.models[MODEL].seals.newest
    assert newest is not None
    assert (newest.version, newest.rollback_of) == (2, None)


@in_service()
async def test_rows_that_operators_have_deleted_since_do_not_come_back(service: Service) -> None:
    session = await publish(service, takes_deletes=True)
    await session.coordinator.settled()
    kept = await service.versions.keep(MODEL)
    first = service.models[MODEL].position
    asked = await service.removals.delete_rows(MODEL, USER.name, [3])
    carried = close(2, 1)
    carried.close.deletes.append(asked.request.number)
    await send(session, [delete_chunk(2, 0, [3]), carried])
    await send(session, part(3, [(0, [4], np.ones((1, USER.dim), np.float32))]))
    await session.coordinator.settled()
    await roll_back(service.models, MODEL, str(kept.version), service.events, "me")
    await session.coordinator.settled()
    user = service.models[MODEL].tables.followed(Policy())[0]
    assert user.deleted(np.array([3, 4])).tolist() == [True, False]
    assert not (user.rows_of(np.array([4])) == 1).all()
    again = await join(service, run="later", started=time.time_ns(), continues=first, takes_deletes=True)
    assert [each.ids.tolist() for each in again.deletes] == [[3]], "the trainer has the row of that version"
