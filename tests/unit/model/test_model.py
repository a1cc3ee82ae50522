"""Races and failures of a model's tables and releases: what must hold whichever comes first."""

import asyncio
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.local_service import join, opened, publish, send
from tests.support.log import log_of
from tests.support.wire import WHOLE, full_part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable
from deltasync.core.rows import DamagedRows, RowBatch
from deltasync.core.tables import TableSpec
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service


def check_rows(service: Service, rows: list[Any], model: str = "clicks") -> None:
    for table, expected in zip(service.models[model].tables, rows, strict=True):
        np.testing.assert_array_equal(table.rows, expected)


def logged_versions(service: Service) -> set[int]:
    return {record.number for record in log_of(service).read("cuts/clicks")}


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_log_back_to_the_second_newest_checkpoint_is_enough(tmp_path: Path, lost: int) -> None:
    async with opened(tmp_path) as service:
        session = await publish(service)
        for step, left in {2: {1, 2}, 3: {3}, 4: {4}}.items():
            await send(session, full_part(step, random_rows(step), WHOLE))
            await session.coordinator.settled()
            newest = await service.checkpoints.make("clicks")
            assert logged_versions(service) == left
    if lost:
        (tmp_path / "checkpoints" / newest.name).unlink()
    async with opened(tmp_path) as service:
        assert service.models["clicks"].position.number == 4
        check_rows(service, random_rows(4))


async def test_a_checkpoint_that_a_new_table_overtakes_loses_nothing(tmp_path: Path) -> None:
    extra, joining = TableSpec("extra", 2, 1), list[Future[PublishSession]]()
    async with opened(tmp_path) as service:
        loop = asyncio.get_running_loop()
        await publish(service)

        def overtaken() -> None:
            if not joining:
                another = publish(service, 2, run="run-2", started=2, tables=[extra])
                joining.append(asyncio.run_coroutine_threadsafe(another, loop))
                joining[0].result(20)

        manifest = await service.models["clicks"].checkpoint(list, dict, overtaken)
        assert joining
    shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))
    (copy / "checkpoints" / manifest.name).unlink()
    for folder in (tmp_path, copy):
        async with opened(folder) as service:
            tables = service.models["clicks"].tables
            assert [each.spec for each in tables] == [WHOLE[0].table, WHOLE[1].table, extra]
            check_rows(service, [*random_rows(1), *random_rows(2, [extra])])


async def test_two_models_do_not_mix(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for step, model in enumerate(("clicks", "click"), 1):
            await publish(service, step, model=model)
    async with opened(tmp_path) as service:
        for step, model in enumerate(("clicks", "click"), 1):
            check_rows(service, random_rows(step), model)


async def test_a_cut_of_a_rank_that_has_gone_is_sealed(tmp_path: Path) -> None:
    rows = random_rows(1)
    async with opened(tmp_path) as service:
        session = await join(service)
        await send(session, full_part(1, rows, WHOLE)[:-1])
        async with session.coordinator.between_cuts():
            gone = asyncio.create_task(send(session, full_part(1, rows, WHOLE)[-1:]))
            while not (session.coordinator.open_cut and session.coordinator.open_cut.cut.ends):
                await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        await session.coordinator.settled()
        assert session.coordinator.model.seals.newest_version == 1
    async with opened(tmp_path) as service:
        check_rows(service, rows)


@in_service()
async def test_no_table_is_made_once_the_service_ends(service: Service) -> None:
    """The log is closed by then: whoever waits for it would wait for ever, and the process with it."""
    await publish(service)
    model = service.models["clicks"]
    closing = asyncio.create_task(model.stop())
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await model.tables.add([TableSpec("another", 2, 2)])
    await closing
    assert "another" not in model.store.specs


async def test_a_cut_that_changed_in_memory_is_read_from_the_tables(tmp_path: Path) -> None:
    """Replicas would refuse them for ever. Read from the tables, they are found, and the model is loaded again."""
    table, ids = TableSpec("user", 9, 3), np.arange(9)
    local = await LocalModel.opened(tmp_path)

    async def cut(rows: RowBatch) -> None:
        """Publish rows while a replica follows the model."""
        await local.model.release(local.model.position.number - 1)
        await local.cut_batches([rows])

    try:
        await local.add(table)
        first = RowBatch.of_table(table, ids, np.zeros((9, 3), "<f4"))
        await local.cut_batches([first])
        rows = RowBatch.of_table(table, ids, np.ones((9, 3), "<f4")).digested()
        await cut(rows)
        assert local.model.release(1).done(), "it was made with the cut"
        await cut(replace(rows, values=rows.values + (ids == 7)[:, None]))
        with pytest.raises(DamagedRows, match="'user': bits have changed in row 7"):
            await local.model.release(2)
    finally:
        await local.close()
