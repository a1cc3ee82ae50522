"""Races and failures of a model's tables and releases: what must hold whichever comes first."""

import asyncio
import gc
import os
import shutil
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, opened, publish, run, send
from tests.support.log import log_of
from tests.support.mapping import in_a_file
from tests.support.releases import deleted_rows
from tests.support.wire import WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.core.errors import ServiceUnavailable
from deltasync.core.tables import TableSpec
from deltasync.feeds import releases
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.publish.session import PublishSession
from deltasync.service.service import Service
from deltasync.storage.lmdb_store import LmdbStore


def check_rows(service: Service, rows: list[Any], model: str = "clicks") -> None:
    for table, expected in zip(service.models[model].tables, rows, strict=True):
        np.testing.assert_array_equal(table.rows, expected)


async def test_a_flush_cuts_the_log_and_what_is_left_is_enough(tmp_path: Path) -> None:
    rows = random_rows(0)
    async with opened(tmp_path) as service:
        session = await join(service)
        for step in (1, 2):
            await send(session, full_part(step, rows, WHOLE))
        model = service.models["clicks"]
        await service.coordinators["clicks"].drain()
        assert model.should_flush(1)
        await asyncio.gather(*(asyncio.to_thread(model.flush) for _ in range(3)))
        assert not model.should_flush(1)
        assert log_of(service).streams() == ["seals/clicks"]
        assert [seal.version for seal in model.store.seals()] == [1, 2]
    async with opened(tmp_path) as service:
        assert service.models["clicks"].position.number == 2
        check_rows(service, rows)


async def test_a_flush_meanwhile_does_not_forget_a_new_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write down which tables there are: who has read last must write last."""
    extra = TableSpec("extra", 2, 1)
    put = LmdbStore.put
    joining: list[Future[PublishSession]] = []
    async with opened(tmp_path) as service:
        loop = asyncio.get_running_loop()
        await publish(service)

        def slow(log: LmdbStore, *arguments: Any) -> Future[None]:
            if not joining:
                another = publish(service, 2, run="run-2", started=2, tables=[extra])
                joining.append(asyncio.run_coroutine_threadsafe(another, loop))
                # It either overtakes what is written here, or has to wait for it.
                wait(joining, 0.2)
            return put(log, *arguments)

        monkeypatch.setattr(LmdbStore, "put", slow)
        await asyncio.to_thread(service.models["clicks"].flush)
        await asyncio.wrap_future(joining[0])
    async with opened(tmp_path) as service:
        tables = service.models["clicks"].tables
        assert [each.spec for each in tables] == [WHOLE[0].table, WHOLE[1].table, extra]


async def test_what_was_not_sealed_is_dropped_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        session = await publish(service)
        await send(session, part(2, [(0, [1], np.ones((1, 4), "<f4"))])[:-1])
    async with opened(tmp_path) as service:
        assert not list(log_of(service).read("cuts/clicks", 2))
        assert service.models["clicks"].position.number == 1


async def test_two_models_do_not_mix(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for step, model in enumerate(("clicks", "click"), 1):
            await publish(service, step, model=model)
    async with opened(tmp_path) as service:
        for step, model in enumerate(("clicks", "click"), 1):
            check_rows(service, random_rows(step), model)


async def test_tables_are_written_down_even_if_the_rank_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, making, go = random_rows(1), threading.Event(), threading.Event()
    allocate = os.posix_fallocate

    def slow(*arguments: int) -> None:
        making.set()
        assert go.wait(20)
        allocate(*arguments)

    async with opened(tmp_path) as service:
        monkeypatch.setattr(os, "posix_fallocate", slow)
        gone = asyncio.create_task(publish(service))
        await asyncio.to_thread(making.wait)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        go.set()
        await service.wait_idle(20)
        assert service.models["clicks"].seals.newest_version == 1
    async with opened(tmp_path) as service:
        check_rows(service, rows)


@in_service()
async def test_releases_share_the_memory_there_is_for_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spilled(release: FrozenRelease) -> bool:
        return any(in_a_file(chunk.rows.values) for chunk in release.chunks)

    session = await publish(service)
    await send(session, full_part(2, random_rows(1), WHOLE))
    await service.coordinators["clicks"].drain()
    model = service.models["clicks"]
    first = await model.release(0)
    monkeypatch.setattr(releases, "RELEASES_IN_MEMORY_BYTES", 2 * first.memory_bytes - 1)
    second = await model.release(1)
    assert (spilled(first), spilled(second), second.memory_bytes) == (False, True, 0)
    del first
    gc.collect()
    assert not spilled(await model.release(0))


@in_service()
async def test_no_table_is_made_once_the_service_ends(service: Service, tmp_path: Path) -> None:
    """The log is closed by then: whoever waits for it would wait for ever, and the process with it."""
    await publish(service)
    model = service.models["clicks"]
    closing = asyncio.create_task(model.close())
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await model.add_tables([TableSpec("another", 2, 2)])
    await closing
    assert not list(tmp_path.rglob("*another*"))


def test_rows_that_a_full_cut_does_not_name_are_deleted_also_when_it_is_applied_again(tmp_path: Path) -> None:
    rows = random_rows(0)
    named = np.array([0, 2, 3])
    whole = [(slot, named, rows[slot][named]) for slot in range(2)]

    async def first(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, rows, WHOLE))
        await send(session, part(2, whole))  # A delta never deletes.
        await service.coordinators["clicks"].drain()
        tables = service.models["clicks"].tables
        assert [table.changed_since(0).tolist() for table in tables] == [list(range(len(each))) for each in rows]
        assert not any(table.deleted(np.arange(len(each))).any() for table, each in zip(tables, rows, strict=True))
        await send(session, part(3, whole, full=True))
        await service.coordinators["clicks"].drain()
        await check(service)
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")

    async def check(service: Service) -> None:
        model = service.models["clicks"]
        for table, expected in zip(model.tables, rows, strict=True):
            ids = np.arange(len(expected))
            assert np.flatnonzero(~table.deleted(ids)).tolist() == named.tolist()
            assert table.rows[named].tolist() == expected[named].tolist()
            assert not table.rows[table.deleted(ids)].any()
            assert table.stamps[named].tolist() == [3, 3, 3]
            assert set(table.stamps[table.deleted(ids)].tolist()) == {-3}
        released = await model.release(2)
        assert {slot: len(each) for slot, each in deleted_rows(released).items()} == {
            slot: len(each) - len(named) for slot, each in enumerate(rows)
        }

    run(tmp_path / "data", first)
    run(tmp_path / "crashed", check)
    run(tmp_path / "data", check)
