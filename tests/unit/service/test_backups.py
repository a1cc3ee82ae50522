"""What a backup has, whatever happens to a service's models meanwhile."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_service import backups, check, opened, publish
from tests.support.wire import ITEM
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable
from deltasync.core.rows import DamagedRows
from deltasync.model.model import Model
from deltasync.service import checkpoints
from deltasync.service.backup import BackupPlace
from deltasync.service.checkpoints import small_records
from deltasync.service.restore import restore
from deltasync.service.service import Service


@in_service()
async def test_a_model_that_is_reloaded_as_it_begins_is_not_left_out(
    service: Service, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = tmp_path_factory.mktemp("backup")
    await publish(service)
    await publish(service, model="other")
    model, begin, loop = service.models["clicks"], BackupPlace.begin, asyncio.get_running_loop()
    never, away = asyncio.Event(), asyncio.Event()

    async def recover(*_: object) -> None:
        away.set()
        await never.wait()

    async def fail() -> None:
        model.tables[0].rows.view(np.uint8)[3, 1] ^= 16
        with pytest.raises(DamagedRows):
            await model.release(0)
        await service.reloading.watch(model)
        await away.wait()

    def slowly(place: BackupPlace) -> None:
        begin(place)
        asyncio.run_coroutine_threadsafe(fail(), loop).result(20)

    monkeypatch.setattr(BackupPlace, "begin", slowly)
    monkeypatch.setattr(Model, "recover", recover)
    with pytest.raises(ServiceUnavailable, match="model 'clicks' is being reloaded"):
        await backups(service).make(str(backup), "who asks")
    with pytest.raises(ServiceUnavailable, match="model 'clicks' is being reloaded"):
        await check(service)
    assert not list(backup.iterdir())


async def test_a_table_that_was_made_again_after_its_record_was_read_has_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "data") as service:
        session = await publish(service)
        old = small_records(service.models["clicks"].log, "clicks")
        session.end("its stream has ended")
        await service.removals.delete_table("clicks", ITEM.name, "who asks")
        await publish(service, 2, run="run-2", started=2, continues=service.models["clicks"].position)
        wanted = {each.spec.name: each.rows.tobytes() for each in service.models["clicks"].tables}
        monkeypatch.setattr(checkpoints, "small_records", lambda *_: old)
        await backups(service).make(str(tmp_path / "backup"), "who asks")
    restore(tmp_path / "backup", tmp_path / "restored")
    async with opened(tmp_path / "restored") as service:
        model = service.models["clicks"]
        assert {each.spec.name: each.rows.tobytes() for each in model.tables} == wanted
