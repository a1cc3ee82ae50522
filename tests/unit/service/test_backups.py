"""What a backup has, whatever happens to a service's models meanwhile."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.controlled_storage import ControlledStorage
from tests.support.faults import Held, Hook
from tests.support.local_service import backups, check, faults_of, opened, publish
from tests.support.wire import ITEM
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import ServiceUnavailable
from deltasync.checkpoints.file_storage import Place
from deltasync.core.rows import DamagedRows
from deltasync.service.restore import restore
from deltasync.service.service import Service


@in_service()
async def test_a_model_that_is_reloaded_as_it_begins_is_not_left_out(service: Service) -> None:
    await publish(service)
    await publish(service, model="other")
    model, recovering, storage = (
        service.models["clicks"],
        Held("layouts/clicks"),
        ControlledStorage("backup-begins"),
    )
    with faults_of(service).log.replaced(read=recovering):
        with storage.silent():
            making = asyncio.create_task(backups(service).make(storage.url, "who asks"))
            await asyncio.to_thread(storage.asked.wait, 20)
            model.tables[0].rows.view(np.uint8)[3, 1] ^= 16
            with pytest.raises(DamagedRows):
                await model.release(0)
            await service.reloading.watch(model)
            await recovering.has_begun()
        with pytest.raises(ServiceUnavailable, match="model 'clicks' is being reloaded"):
            await making
        with pytest.raises(ServiceUnavailable, match="model 'clicks' is being reloaded"):
            await check(service)
        assert not Place(storage.url).names("")
        recovering.let_go()


async def test_a_backup_has_the_rows_of_a_table_that_was_just_made_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "data") as service:
        session = await publish(service)
        old = service.models["clicks"].log.items("model/clicks")
        session.end("its stream has ended")
        await service.removals.delete_table("clicks", ITEM.name, "who asks")
        await publish(service, 2, run="run-2", started=2, continues=service.models["clicks"].position)
        wanted = {each.spec.name: each.rows.tobytes() for each in service.models["clicks"].tables}

        def read_before(items: Hook, name: str) -> dict[str, bytes]:
            return old if name == "model/clicks" else items(name)

        with faults_of(service).log.replaced(items=read_before):
            await backups(service).make(str(tmp_path / "backup"), "who asks")
    restore(tmp_path / "backup", tmp_path / "restored")
    async with opened(tmp_path / "restored") as service:
        model = service.models["clicks"]
        assert {each.spec.name: each.rows.tobytes() for each in model.tables} == wanted
