"""Races and failures of ranks that publish: what must hold whichever comes first."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import HeldWrites, join, opened, publish, run, send
from tests.support.log import log_of
from tests.support.releases import frozen
from tests.support.wire import ITEM, TABLES, USER, WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import DeltasyncError, ResyncRequired, StorageFailed, Superseded
from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.session import PublishSession
from deltasync.model.model_store import ModelStore
from deltasync.service.service import Service


@in_service()
async def test_a_run_that_takes_over_while_a_cut_is_sealed_is_not_taken_for_its_publisher(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its changed rows alone would be accepted, on top of another run's."""
    sealing = HeldWrites(monkeypatch, "seal")
    old = await join(service)
    last = asyncio.create_task(send(old, full_part(5, random_rows(0), WHOLE)))
    await sealing.begun.wait()
    new = await join(service, run="run-2", started=2)
    delta = part(5, [(0, [1], np.ones((1, 4), "<f4"))])
    with pytest.raises(Superseded, match="step 5 is being sealed"):
        await send(new, delta)
    sealing.let_go()
    await last
    (seal,), _ = service.models["clicks"].store.seals()
    assert (seal.run, seal.world_size) == ("run-1", 1)
    assert not new.decision.yes
    with pytest.raises(DeltasyncError, match="publish every row first"):
        await send(new, delta)


def test_nothing_of_a_cut_is_there_before_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what replicas will be sent of it is written meanwhile."""

    async def scenario(service: Service) -> None:
        session = await publish(service)
        model = service.models["clicks"]
        await model.release(0)  # Somebody follows.
        with monkeypatch.context() as patch:
            sealing = HeldWrites(patch, "seal")
            sealed = asyncio.create_task(send(session, part(2, [(0, [3], np.full((1, 4), 7, "<f4"))])))
            await sealing.begun.wait()
            await model.on_thread(lambda: None)  # What was asked of the thread before is done.
            release = frozen(await model.release(0))
            assert (release.head, model.position.number, model.seals.newest_version) == (model.head, 1, 1)
            assert not (await model.on_thread(lambda: model.tables[0].rows[3].copy()) == 7).any()
            assert not sealed.done()
            sealing.let_go()
            assert await sealed == Position(model.history, 2)
        await service.models.coordinators["clicks"].drain()
        kept = frozen(await model.release(1))
        assert kept.head is not None
        assert (kept.head.number, kept.checksums) == (2, frozen(await model.release(0)).checksums)
        assert (await model.on_thread(lambda: model.tables[0].rows[3].copy()) == 7).all()

    run(tmp_path, scenario)


@in_service()
async def test_a_cut_that_cannot_be_written_is_not_applied(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> "Future[None]":
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the log is full"))
        return failed

    session = await publish(service)
    model, changes = service.models["clicks"], part(2, [(0, [3], np.full((1, 4), 7, "<f4"))])
    with monkeypatch.context() as patch:
        patch.setattr(ModelStore, "seal", refused)
        with pytest.raises(StorageFailed, match="the log is full"):
            await send(session, changes)
    await model.on_thread(lambda: None)
    assert model.position.number == model.seals.newest_version == 1
    await asyncio.wrap_future(log_of(service).put("after", b""))
    assert not list(log_of(service).read("cuts/clicks", 2)), "the log has nothing of it any more"
    assert not (await model.on_thread(lambda: model.tables[0].rows[3].copy()) == 7).any()
    again = await join(service)
    assert await send(again, full_part(2, random_rows(1), WHOLE)) == Position(model.history, 2)


@in_service()
async def test_a_rank_that_cannot_continue_publishes_everything_whatever_the_others_claim(
    service: Service,
) -> None:
    first = await join(service)
    position = await send(first, full_part(1, random_rows(0), WHOLE))
    shards = [[WHOLE[0]], [WHOLE[1]]]
    ranks = [
        await join(service, run="run-2", started=2, world_size=2, rank=rank, shards=shards[rank], continues=claim)
        for rank, claim in enumerate([position, None])
    ]
    waiting = asyncio.create_task(send(ranks[0], part(2, [])))
    with pytest.raises(DeltasyncError, match="rank 1 sent only changed rows"):
        await send(ranks[1], part(2, []))
    sealed = await send(ranks[1], full_part(2, random_rows(1), shards[1]))
    assert await waiting == sealed


@in_service()
async def test_a_cut_given_up_while_its_last_part_reaches_the_disk_stays_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [[WHOLE[0]], [WHOLE[1]]]
    ranks = [await join(service, world_size=2, rank=rank, shards=shards[rank]) for rank in range(2)]
    rows = random_rows(0)
    with monkeypatch.context() as patch:
        appending = HeldWrites(patch, "append")
        slow = asyncio.create_task(send(ranks[0], full_part(1, rows, shards[0])))
        await appending.begun.wait()
    other = asyncio.create_task(send(ranks[1], full_part(2, rows, shards[1])))
    await asyncio.sleep(0)
    appending.let_go()
    with pytest.raises(Superseded, match="cut of step 1: abandoned for the cut of step 2"):
        await slow
    assert not ranks[0].coordinator.model.store.seals()[0]
    position = await send(ranks[0], full_part(2, rows, shards[0]))
    assert await other == position == Position(ranks[0].sealed.history, 1)


@in_service()
async def test_a_part_of_which_a_record_is_not_on_disk_is_not_sealed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = ModelStore.append

    def first_chunk_fails(store: ModelStore, version: int, rank: int, index: int, *arguments: Any) -> Future[None]:
        if index != 0:
            return append(store, version, rank, index, *arguments)
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the log is full"))
        return failed

    session = await join(service)
    with monkeypatch.context() as patch:
        patch.setattr(ModelStore, "append", first_chunk_fails)
        with pytest.raises(StorageFailed, match="the log is full"):
            await send(session, full_part(1, random_rows(0), WHOLE))
    assert not session.coordinator.model.store.seals()[0]
    again = await join(service)
    assert await send(again, full_part(1, random_rows(0), WHOLE)) == Position(again.sealed.history, 1)


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
        await service.models.coordinators["clicks"].drain()
        tables = service.models["clicks"].tables
        assert [table.stamps.tolist() for table in tables] == [[1] * 40, [2] * 30]
        delta = [send(session, part(5, [])) for session in ranks]
        assert {position.number for position in await asyncio.gather(*delta) if position} == {3}
    async with opened(tmp_path) as service:
        session = await join(service, run="run-3", started=3, continues=Position(heads[0].history, 3))
        assert session.decision.yes


@in_service()
async def test_what_a_rank_holds_counts_as_bytes_of_the_log_once(service: Service) -> None:
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
    logged = [record for name in ("cuts", "layouts") for record in log_of(service).read(f"{name}/clicks")]
    assert before + model.seals[-1].log_bytes == sum(len(record.payload) for record in logged)


@pytest.mark.parametrize("tables", [[*TABLES, TableSpec("more", 5, 3)], [replace(USER, rows=60), ITEM]])
@in_service()
async def test_tables_announced_while_a_cut_is_sealed_are_made_for_the_next_one(
    service: Service, tables: list[TableSpec]
) -> None:
    """Else that would be sealed, and nobody could ever apply it."""
    old = await publish(service)
    async with old.coordinator.between_cuts():
        last = asyncio.create_task(send(old, part(2, [(0, [1], np.ones((1, 4), "<f4"))])))
        while not (old.coordinator.open_cut and old.coordinator.open_cut.cut.ends):
            await asyncio.sleep(0)
        shards = [Shard.whole(table) for table in tables]
        new = await join(service, run="run-2", started=2, tables=tables, shards=shards)
    await last
    rows = [(slot, range(len(some)), some) for slot, some in enumerate(random_rows(3, tables))]
    await send(new, part(3, rows, full=True))
    await new.coordinator.settled()
    model = service.models["clicks"]
    assert model.failure == ""
    assert [each.spec for each in model.tables] == tables
