"""A cut from its last part to the replicas, and what becomes of it if anything fails on this way."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, opened, publish, send
from tests.support.log import held_up, log_of
from tests.support.releases import frozen
from tests.support.wire import ITEM, USER, WHOLE, chunk, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, DeltasyncError, ResyncRequired, ServiceUnavailable, Superseded
from deltasync.base.events import Event, EventKind
from deltasync.core.cut_times import RecentCuts
from deltasync.core.position import Position
from deltasync.core.rows import Ids
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.coordinator import FORSAKEN_SECONDS, CutCoordinator
from deltasync.cuts.cut import PartEnd
from deltasync.cuts.session import PublishSession
from deltasync.model.model import Model
from deltasync.model.model_store import ModelStore
from deltasync.service.service import Service

HALVES = [[WHOLE[0]], [WHOLE[1]]]


def change(step: int, row: int = 3, value: float = 7) -> list[Any]:
    return part(step, [(0, [row], np.full((1, 4), value, "<f4"))])


def failing_at(kind: EventKind) -> Callable[[Event], None]:
    """A listener that cannot take one kind of event."""

    def listener(event: Event) -> None:
        if event.kind is kind:
            raise ZeroDivisionError("a mistake of ours")

    return listener


@contextmanager
def broken_table(model: Model) -> Iterator[None]:
    """No cut can be applied to the first table while the block runs."""

    def broken(_: Ids) -> None:
        raise ZeroDivisionError("a mistake of ours")

    model.tables[0].before_change.append(broken)
    try:
        yield
    finally:
        model.tables[0].before_change.remove(broken)


async def becomes(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not wanted():
            await asyncio.sleep(0.001)


async def closed(ranks: CutCoordinator) -> None:
    """Wait until a part of the cut under way is closed."""
    await becomes(lambda: bool(ranks.open_cut and ranks.open_cut.cut.ends))


async def logged(service: Service) -> int:
    """Bytes that the log has of cuts, once all is written."""
    await asyncio.wrap_future(log_of(service).put("after", b""))
    return sum(len(each.payload) for each in log_of(service).read("cuts/clicks"))


# Before the log has the seal.


@in_service()
async def test_nothing_of_a_cut_is_visible_before_it_is_on_disk(service: Service) -> None:
    session = await publish(service)
    model = service.models["clicks"]
    await model.release(0)  # A replica follows.
    with held_up(log_of(service)):
        answer = asyncio.create_task(send(session, change(2)))
        await closed(session.coordinator)
        await model.on_thread(lambda: None)
        release = frozen(await model.release(0))
        assert (release.head, model.position.number, model.seals.newest_version) == (model.head, 1, 1)
        assert not (await model.on_thread(lambda: model.tables[0].rows[3].copy()) == 7).any()
        assert not answer.done()
    assert await answer == Position(model.history, 2)
    kept = frozen(await model.release(1))
    assert kept.head is not None
    assert (kept.head.number, kept.checksums) == (2, frozen(await model.release(0)).checksums)


@pytest.mark.parametrize("too_large", [True, False])
@in_service()
async def test_a_cut_that_the_full_log_refuses_at_its_seal_leaves_nothing(
    service: Service, too_large: bool
) -> None:
    session = await publish(service)
    ranks, log, capacity = session.coordinator, log_of(service), log_of(service).capacity
    await send(session, [chunk(2, 0, [3], np.full((1, 4), 7, "<f4"))])
    assert ranks.open_cut
    log.capacity = ranks.open_cut.cut.log_bytes - too_large
    error = Contradiction if too_large else DeltasyncError
    said = "the cut of step 2 already needs" if too_large else "the log is full"
    with pytest.raises(error, match=said):
        await session.close(PartEnd(2, 1))
    model = service.models["clicks"]
    assert model.failure.startswith("a cut is too large for the log") is too_large
    assert service.models.troubles == ([f"model 'clicks': {model.failure}"] if too_large else [])
    assert model.position.number == model.seals.newest_version == 1
    log.capacity = capacity
    await logged(service)
    assert not list(log.read("cuts/clicks", 2))
    assert await send(await join(service), full_part(2, random_rows(1), WHOLE)) == Position(model.history, 2)


@in_service()
async def test_a_cut_that_cannot_be_sealed_is_sent_again(service: Service) -> None:
    session, wrong = await publish(service), PartEnd(2, 0, step_end_unix_ns="now")  # type: ignore[arg-type]
    model, said = session.coordinator.model, "the cut of step 2 could not be sealed; send it again: TypeError"
    with pytest.raises(ServiceUnavailable, match=said):
        await session.close(wrong)
    assert model.failure.startswith(said)
    assert service.event_counts[EventKind.FAILED] == 1
    assert await send(session, change(2)) == Position(model.history, 2)
    assert not model.failure


@pytest.mark.parametrize("in_log", [False, True])
@in_service()
async def test_an_interrupted_seal_is_answered_as_the_log_decides(service: Service, in_log: bool) -> None:
    session = await publish(service)
    ranks = session.coordinator

    async def interrupt() -> None:
        (sealing,) = (each for each in asyncio.all_tasks() if "._seal" in str(each.get_coro()))
        sealing.cancel()
        await asyncio.sleep(0)

    if in_log:
        with held_up(log_of(service)):
            answer = asyncio.create_task(send(session, change(2)))
            await becomes(lambda: log_of(service).queue.bytes > 4 << 10)  # The seal is the fourth write.
            await interrupt()
        assert (await answer) == Position(session.sealed.history, 2)
        return
    async with ranks.between_cuts():
        answer = asyncio.create_task(send(session, change(2)))
        await closed(ranks)
        await interrupt()
    with pytest.raises(ServiceUnavailable, match="step 2 was interrupted; send it again"):
        await answer
    assert await send(session, change(2)) == Position(session.sealed.history, 2)


@in_service()
async def test_tables_announced_during_a_seal_are_made_for_the_next_cut(service: Service) -> None:
    """Else that would be sealed, and nobody could ever apply it."""
    old, tables = await publish(service), [replace(USER, rows=60), ITEM, TableSpec("more", 5, 3)]
    async with old.coordinator.between_cuts():
        last = asyncio.create_task(send(old, change(2)))
        await closed(old.coordinator)
        shards = [Shard.whole(table) for table in tables]
        new = await join(service, run="run-2", started=2, tables=tables, shards=shards)
    await last
    rows = [(slot, range(len(some)), some) for slot, some in enumerate(random_rows(3, tables))]
    await send(new, part(3, rows, full=True))
    model = service.models["clicks"]
    assert model.failure == ""
    assert [each.spec for each in model.tables] == tables


# After the log has the seal.


@in_service()
async def test_deletes_of_a_durable_cut_are_finished_before_it_is_applied(service: Service) -> None:
    """A crash meanwhile would repeat them."""
    session, go = await publish(service, takes_deletes=True), threading.Event()
    number = (await service.removals.delete_rows("clicks", USER.name, [3])).request.number
    ranks, sealed = session.coordinator, service.event_counts[EventKind.CUT_SEALED]
    ranks.model.submit(go.wait)
    requests = part(2, [])
    requests[-1].close.deletes.append(number)
    answer = asyncio.create_task(send(session, requests))
    try:
        await becomes(lambda: ranks.model.seals.newest_version == 2)
        assert (ranks.deletes.requests, number in ranks.deletes.done) == ({}, True)
        assert service.event_counts[EventKind.CUT_SEALED] == sealed + 1
        assert not answer.done()
    finally:
        go.set()
    assert (await answer) == Position(ranks.model.history, 2)


class Forgetful(RecentCuts):
    """Fails once, when a cut is shown to replicas."""

    failed = False

    def note_applied(self, version: int) -> None:
        if not self.failed:
            self.failed = True
            raise ZeroDivisionError("a mistake of ours")
        super().note_applied(version)


@in_service()
async def test_a_version_that_could_not_be_shown_is_shown_later(service: Service) -> None:
    """Even if the error cannot be reported."""
    session = await publish(service)
    model = service.models["clicks"]
    model.recent = Forgetful()
    service.events.listen(failing_at(EventKind.FAILED))
    assert (await send(session, change(2))) == model.position == Position(model.history, 2)
    assert (await send(session, change(3))) == model.position == Position(model.history, 3)


@in_service()
async def test_a_version_that_cannot_be_applied_is_answered_once_it_is(service: Service) -> None:
    session = await publish(service)
    model = service.models["clicks"]
    with broken_table(model):
        answer = asyncio.create_task(send(session, change(2)))
        await becomes(lambda: service.event_counts[EventKind.FAILED] > 2)
        assert model.failure == (
            "version 2 could not be applied; the service retries: ZeroDivisionError: a mistake of ours"
        )
        assert model.position.number == 1
        assert not answer.done(), "its rank would ask for a version that nobody can get"
        other = await join(service, model="other")
        assert (await send(other, full_part(1, random_rows(1), WHOLE))) == Position(other.sealed.history, 1)
    assert (await answer) == Position(model.history, 2)
    assert (await send(session, change(3, 4, 8))) == model.position == Position(model.history, 3)
    assert not model.failure
    rows = await model.on_thread(lambda: model.tables[0].rows[3:5].copy())
    assert rows.tolist() == [[7] * 4, [8] * 4]


async def test_no_version_is_sealed_at_the_end_over_one_that_is_not_applied(tmp_path: Path) -> None:
    """A checkpoint would be written, and the log cut, without the rows of the one before."""
    async with opened(tmp_path) as service:
        session = await publish(service)
        with broken_table(service.models["clicks"]):
            answer = asyncio.create_task(send(session, change(2)))
            await becomes(lambda: service.event_counts[EventKind.FAILED] > 1)
            await session.coordinator.drain()
            assert (await answer) == Position(session.sealed.history, 2)  # The next start applies it.
            with pytest.raises(ServiceUnavailable, match="version 2 is not applied yet"):
                await send(session, change(3))
    async with opened(tmp_path) as again:
        model = again.models["clicks"]
        assert model.position.number == 2
        assert model.tables[0].rows[3].tolist() == [7] * 4


# Cuts that end early.


@in_service()
async def test_a_listener_that_fails_keeps_no_run_from_taking_over(service: Service) -> None:
    old = await join(service)
    service.events.listen(failing_at(EventKind.RUN_SUPERSEDED))
    new = await join(service, run="run-2", started=2)
    assert list(new.coordinator.sessions.values()) == [new.stream]
    with pytest.raises(Superseded, match="a newer run"):
        await send(old, full_part(1, random_rows(0), WHOLE))


class Undroppable(ModelStore):
    """A store that cannot drop the rows of a cut."""

    def drop_cut(self, version: int) -> Any:
        raise ZeroDivisionError("a mistake of ours")


@in_service()
async def test_ranks_are_answered_even_if_their_cut_cannot_be_dropped(service: Service) -> None:
    sessions = [await join(service, world_size=2, rank=rank, shards=HALVES[rank]) for rank in range(2)]
    model = sessions[0].coordinator.model
    model.store = Undroppable(model.log, model.name)
    answer = asyncio.create_task(send(sessions[0], full_part(1, random_rows(0), HALVES[0])))
    await closed(sessions[0].coordinator)
    with pytest.raises(ZeroDivisionError):
        sessions[0].coordinator.abandon("a test wants it")
    with pytest.raises(Superseded, match="a test wants it"):
        await answer
    assert sessions[0].coordinator.open_cut is None


@in_service()
async def test_parts_are_dropped_once_all_ranks_were_away_for_long(service: Service) -> None:
    async def begin(rank: int) -> PublishSession:
        session = await join(service, rank=rank, world_size=2, shards=HALVES[rank])
        await send(session, full_part(1, random_rows(0), HALVES[rank])[:-1])
        return session

    first, second = await begin(0), await begin(1)
    ranks = first.coordinator
    first.end("gone")
    ranks.abandon_forsaken(1000)
    ranks.abandon_forsaken(9000)
    assert await logged(service), "a rank is there"
    second.end("gone")
    ranks.abandon_forsaken(9001)
    again = await begin(0)
    ranks.abandon_forsaken(9002)
    again.end("gone")
    ranks.abandon_forsaken(9003)
    ranks.abandon_forsaken(9003 + FORSAKEN_SECONDS - 1)
    assert await logged(service), "a rank that came back has all the time again"
    ranks.abandon_forsaken(9003 + FORSAKEN_SECONDS)
    assert await logged(service) == 0
    assert ranks.open_cut is None


# What a part must contain.


@in_service()
async def test_one_rank_that_cannot_continue_publishes_everything(service: Service) -> None:
    """Whatever the others claim."""
    first = await join(service)
    position = await send(first, full_part(1, random_rows(0), WHOLE))
    ranks = [
        await join(service, run="run-2", started=2, world_size=2, rank=rank, shards=HALVES[rank], continues=claim)
        for rank, claim in enumerate([position, None])
    ]
    waiting = asyncio.create_task(send(ranks[0], part(2, [])))
    with pytest.raises(DeltasyncError, match="rank 1 sent only changed rows"):
        await send(ranks[1], part(2, []))
    sealed = await send(ranks[1], full_part(2, random_rows(1), HALVES[1]))
    assert await waiting == sealed


async def test_a_new_table_is_published_whole_whichever_rank_brought_it(tmp_path: Path) -> None:
    """Also by a rank that finds it made already, and after a restart in between."""
    rows, heads = random_rows(0), list[Position]()
    shards = [[Shard(USER, 0, 40, 0, 4), Shard(ITEM, 0, 15, 0, 6)], [Shard(ITEM, 15, 15, 0, 6)]]

    async def joined(service: Service, rank: int) -> PublishSession:
        claim = heads[0]
        return await join(
            service, run="run-2", started=2, world_size=2, rank=rank, shards=shards[rank], continues=claim
        )

    async with opened(tmp_path) as service:
        session = await join(service, tables=[USER], shards=WHOLE[:1])
        heads.append(await send(session, full_part(1, rows, WHOLE[:1])) or Position())
        for rank in (0, 1):
            with pytest.raises(
                ResyncRequired, match=r"0 of its 15 rows of table .*item' that were never published"
            ):
                await send(await joined(service, rank), part(2, []))
    async with opened(tmp_path) as service:
        ranks = [await joined(service, rank) for rank in (0, 1)]
        for step, changes in ((2, []), (3, [(0, np.arange(16, 30), rows[1][16:])])):
            with pytest.raises(ResyncRequired, match="publish every row first"):
                await send(ranks[1], part(step, changes))
        # Nothing else need be published: of the other table all rows are there.
        cut = [
            send(ranks[0], part(4, [(1, np.arange(15), rows[1][:15])])),
            send(ranks[1], part(4, [(0, np.arange(15, 30), rows[1][15:])])),
        ]
        await asyncio.gather(*cut)
        tables = service.models["clicks"].tables
        assert [table.stamps.tolist() for table in tables] == [[1] * 40, [2] * 30]
    async with opened(tmp_path) as service:
        session = await join(service, run="run-3", started=3, continues=Position(heads[0].history, 2))
        assert session.decision.yes


@in_service()
async def test_the_layout_of_a_rank_counts_as_bytes_of_the_log_once(service: Service) -> None:
    """With many tables it is more than the rows."""
    tables = [TableSpec(f"{'long' * 100}{number}", 1, 1) for number in range(50)]
    session = await join(service, tables=tables, shards=[Shard.whole(table) for table in tables])
    whole = part(1, [(slot, [0], np.ones((1, 1), "<f4")) for slot in range(50)], full=True)
    await send(session, whole)
    model = service.models["clicks"]
    before = model.seals[-1].log_bytes
    assert before > 50 * 400
    await send(session, part(2, [(0, [0], np.ones((1, 1), "<f4"))]))
    assert model.seals[-1].bytes == 12
    assert model.seals[-1].log_bytes < 50
    records = [record for name in ("cuts", "layouts") for record in log_of(service).read(f"{name}/clicks")]
    assert before + model.seals[-1].log_bytes == sum(len(record.payload) for record in records)
