"""What may be removed while cuts are in trouble, and who waits for that."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, publish, send
from tests.support.log import log_of
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, publish_open, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.core.errors import Contradiction, ServiceUnavailable
from deltasync.feeds.model import Model
from deltasync.publish.opening import check_open
from deltasync.publish.session import open_session
from deltasync.service import removals
from deltasync.service.removals import Removals
from deltasync.service.service import Service
from deltasync.storage.log_store import LogStore
from deltasync.storage.removal import note_removal

ROWS = random_rows(0)


@in_service()
async def test_a_table_of_a_model_whose_last_cut_was_too_large_is_deleted(service: Service) -> None:
    (await publish(service)).end("it has gone")
    coordinator = service.coordinators["clicks"]
    coordinator.sealer.say_failed("a cut is too large for the log", Contradiction("too large"))
    await Removals(service).delete_table("clicks", ITEM.name, "a test")
    assert [table.spec.name for table in service.models["clicks"].tables] == [USER.name]


@in_service()
async def test_nobody_waits_for_a_deletion_that_waits_for_a_cut_that_cannot_be_applied(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "_LONGEST_SECONDS", 0.01)

    async def fails(*_: Any) -> None:
        raise MemoryError("no room")

    session = await join(service)
    await send(session, full_part(1, ROWS, WHOLE))
    await service.coordinators["clicks"].settled()
    monkeypatch.setattr(Model, "apply_cut", fails)
    await send(session, part(2, [(0, [7], np.full((1, 4), 2, "<f4"))]))
    session.end("it has gone")
    with pytest.raises(ServiceUnavailable, match="cannot be applied now: version 2 could not be applied"):
        await Removals(service).delete_table("clicks", ITEM.name, "a test")
    assert await service.open_model("clicks") is service.coordinators["clicks"]


@in_service()
async def test_a_rank_that_is_let_in_while_its_model_is_deleted_publishes_nothing(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the log would have versions of a model that is no more, for the next one of its name."""
    noting, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(log: LogStore, name: str) -> Future[None]:
        async def later() -> None:
            noting.set()
            await go.wait()
            await asyncio.wrap_future(note_removal(log, name))

        return asyncio.run_coroutine_threadsafe(later(), loop)

    monkeypatch.setattr(removals, "note_removal", slowly)
    (await publish(service)).end("it has gone")
    opening = check_open(publish_open(run="run-2", started=2).open)
    coordinator = await service.open_model("clicks")
    deletion = asyncio.create_task(Removals(service).delete_model("clicks", "a test"))
    await noting.wait()
    session = await open_session(coordinator, opening)
    go.set()
    await deletion
    with pytest.raises(ServiceUnavailable, match="has just been deleted; reconnect"):
        await send(session, full_part(5, ROWS, WHOLE))
    assert log_of(service).streams() == []
    assert not (tmp_path / "models" / "clicks").exists()
