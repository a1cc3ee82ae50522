"""A rollback that fails leaves the model as it was."""

import time

import numpy as np
import pytest
from tests.support.local_service import join, publish, send
from tests.support.wire import USER, close, delete_chunk, part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import InvalidInput, StorageFailed, Superseded
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.policy import Policy
from deltasync.core.seal import rollback_run_id
from deltasync.cuts.sealing import CutSealer
from deltasync.service.rollback import roll_back
from deltasync.service.service import Service

MODEL = "clicks"


def rows_of(service: Service) -> list[bytes]:
    return [table.rows.tobytes() for table in service.models[MODEL].tables]


@in_service()
async def test_a_version_that_cannot_be_read_stops_no_trainer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await publish(service)
    kept = await service.versions.keep(MODEL)
    await send(session, part(2, [(0, [1], np.ones((1, 4), np.float32))]))

    def refuse(*_: object, **__: object) -> None:
        raise StorageFailed("the disk is gone")

    monkeypatch.setattr(CheckpointStore, "load", refuse)
    with pytest.raises(StorageFailed, match="the disk is gone"):
        await roll_back(service.models, MODEL, str(kept.version), service.events, "me")
    position = await send(session, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    assert position is not None
    assert position.number == 3


@in_service()
async def test_after_a_rollback_that_was_not_sealed_the_run_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await publish(service)
    kept = await service.versions.keep(MODEL)
    await send(session, part(2, [(0, [1], np.ones((1, 4), np.float32))]))
    await session.coordinator.settled()
    before = rows_of(service)
    with monkeypatch.context() as patch:

        async def refuse(*_: object) -> None:
            raise StorageFailed("the disk is full")

        patch.setattr(CutSealer, "seal", refuse)
        with pytest.raises(StorageFailed, match="the disk is full"):
            await roll_back(service.models, MODEL, str(kept.version), service.events, "me")
    assert rows_of(service) == before
    with pytest.raises(Superseded):
        await send(session, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    again = await join(service, continues=service.models[MODEL].position)
    position = await send(again, part(3, [(0, [2], np.ones((1, 4), np.float32))]))
    assert position is not None
    assert position.number == 3


@in_service()
async def test_no_trainer_can_pass_for_a_rollback(service: Service) -> None:
    await publish(service)
    with pytest.raises(InvalidInput, match="such ids are reserved for rollbacks"):
        await join(service, run=rollback_run_id(1))


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
