"""Unforeseen errors while a cut is sealed or applied: told, tried again, and nobody else's trouble."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_service import join, opened, publish, send
from tests.support.wire import WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.events import EventKind
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.model.applied_tables import AppliedTables
from deltasync.service.service import Service


def broken(*_: object) -> None:
    raise ZeroDivisionError("a mistake of ours")


APPLY = AppliedTables.apply


def broken_at_2(tables: AppliedTables, seal: Seal, rows: Iterable[RowBatch] | None) -> object:
    if seal.version == 2:
        broken()
    return APPLY(tables, seal, rows)


async def becomes(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not wanted():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.base.waiting._FIRST_SECONDS", 0.001)


@in_service()
async def test_a_cut_that_cannot_be_sealed_is_sent_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await join(service)
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.cuts.cut.Cut.seal", broken)
        with pytest.raises(
            ServiceUnavailable, match=r"step 1 could not be sealed; send it again: ZeroDivisionError"
        ):
            await send(session, full_part(1, random_rows(0), WHOLE))
    model = session.coordinator.model
    assert model.failure == (
        "the cut of step 1 could not be sealed; send it again: ZeroDivisionError: a mistake of ours"
    )
    assert service.event_counts[EventKind.FAILED] == 1
    again = await join(service)
    assert await send(again, full_part(1, random_rows(0), WHOLE)) == Position(model.history, 1)
    assert not model.failure


@in_service()
async def test_a_version_that_cannot_be_applied_is_applied_later_and_answered_then(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await publish(service)
    await becomes(lambda: service.models["clicks"].position.number == 1)
    model = service.models["clicks"]
    with monkeypatch.context() as patch:
        patch.setattr(AppliedTables, "apply", broken_at_2)
        answer = asyncio.create_task(send(session, part(2, [(0, [3], np.full((1, 4), 7, "<f4"))])))
        await becomes(lambda: service.event_counts[EventKind.FAILED] > 2)
        assert model.failure == (
            "version 2 could not be applied; the service retries: ZeroDivisionError: a mistake of ours"
        )
        assert model.position.number == 1
        assert not answer.done(), "its rank would ask for a version that nobody can get"
        other = await join(service, model="other")
        assert (await send(other, full_part(1, random_rows(1), WHOLE))) == Position(other.sealed.history, 1)
    assert (await answer) == Position(model.history, 2)
    assert (await send(session, part(3, [(0, [4], np.full((1, 4), 8, "<f4"))]))) == Position(model.history, 3)
    assert model.position.number == 3
    assert not model.failure
    rows = await model.on_thread(lambda: model.tables[0].rows[3:5].copy())
    assert rows.tolist() == [[7] * 4, [8] * 4]


async def test_no_later_version_is_sealed_at_the_end_over_one_that_was_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint would be written, and the log cut, without the rows of the one before."""
    async with opened(tmp_path) as service:
        session = await join(service)
        ranks = session.coordinator
        await send(session, full_part(1, random_rows(0), WHOLE))
        monkeypatch.setattr(AppliedTables, "apply", broken_at_2)
        answer = asyncio.create_task(send(session, part(2, [(0, [3], np.full((1, 4), 7, "<f4"))])))
        await becomes(lambda: service.event_counts[EventKind.FAILED] > 1)
        await ranks.drain()
        assert (await answer) == Position(session.sealed.history, 2)  # The next start applies it.
        with pytest.raises(ServiceUnavailable, match="version 2 is not applied yet"):
            await send(session, part(3, [(0, [4], np.full((1, 4), 8, "<f4"))]))
    monkeypatch.undo()
    async with opened(tmp_path) as again:
        model = again.models["clicks"]
        assert model.position.number == 2
        assert model.tables[0].rows[3].tolist() == [7] * 4
