"""What a service leaves behind that ends while it makes files: nothing, once the next one has started."""

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.crashes import Crashes
from tests.support.local_service import join, publish, run, send
from tests.support.log import log_of
from tests.support.wire import TABLES, USER, WHOLE, full_part, part, random_rows

from deltasync.client import Policy
from deltasync.core.tables import Shard, TableSpec
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.service.stored_state import check_data_directory
from deltasync.storage import lmdb_store
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.removal import note_removal

WAIT = 20
LATER = [replace(USER, rows=5000), TABLES[1], TableSpec("another", 7, 2)]
KEPT = {"lock", "log", "log/data.mdb", "log/lock.mdb", "models", "models/clicks/views"}


def files_of(service: Service) -> set[str]:
    """Every file and folder of the data directory that nobody uses."""
    data_dir, used = service.options.data_dir, set[Path]()
    for name, model in service.models.items():
        folder = data_dir / "models" / name
        mapped = [table.mapped.files for table in model.tables] + [
            each.files for each in model.store._flushed.values()
        ]
        for consumer in service.registry.of_model(name):
            view = service.views.get(consumer)
            mapped += [table.files for table in view.state.tables] if view else []
        used |= {Path(each.name) for files in mapped for each in files.mappings}
        used |= {folder}
    used |= {parent for path in used for parent in path.parents if parent.is_relative_to(data_dir)}
    found = set(data_dir.rglob("*")) - used
    return {str(path.relative_to(data_dir)) for path in found} - KEPT


async def live(service: Service) -> None:
    """Everything that makes files: tables, a view, later tables, a consumer that goes."""
    session = await join(service)
    await send(session, full_part(1, random_rows(0), WHOLE))
    await service.create_consumer("top", "clicks", Policy(top_k=3))
    consumer = service.registry.get("top")
    service.registry.connect(consumer, "p", asyncio.Event())
    view = service.views.get(consumer)
    assert view
    while view.state.head is None:
        await asyncio.sleep(0.001)
    later = await join(service, run="later", started=2, tables=LATER, shards=[Shard.whole(each) for each in LATER])
    rows = random_rows(1, LATER)
    await send(later, part(2, [(n, np.arange(len(some)), some) for n, some in enumerate(rows)], full=True))
    while len(view.state.tables) < len(LATER):
        await asyncio.sleep(0.001)
    await service.delete_consumer("top")


def test_nothing_is_left_whenever_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_file: bool
) -> None:
    with monkeypatch.context() as patch:
        crashes = Crashes(patch, tmp_path / "data", tmp_path)
        run(tmp_path / "data", live)

    async def starts(service: Service) -> None:
        assert files_of(service) == set()

    assert len(crashes.copies) > 20
    untidy = 0
    for copy in crashes.copies:
        if copy is not crashes.copies[0]:  # Which has no format yet.
            found = check_data_directory(copy)
            assert not found.problems, "a crash is not damage"
            assert not any(each.left for each in found.tables)
        before = set(copy.rglob("*"))
        run(copy, starts)
        untidy += bool(before - set(copy.rglob("*")))
        shutil.rmtree(copy)
    assert untidy > 3, "no crash has left anything"


def no_room(patch: pytest.MonkeyPatch) -> None:
    """Nothing can be written, neither to the log nor to new files."""
    delete = LmdbStore._delete_range

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def deleting(log: LmdbStore, txn: Any, first: bytes, last: bytes) -> None:
        delete(log, txn, first, last)
        records = log._databases[b"records"]
        with txn.cursor(records) as before, log._opened().begin(db=records) as old, old.cursor() as after:
            if list(before) != list(after):
                full()

    patch.setattr(LmdbStore, "_delete_range", deleting)
    for name in ("_put", "_delete"):
        patch.setattr(lmdb_store, name, full)
    patch.setattr(os, "posix_fallocate", full)


def test_a_model_whose_removal_has_no_room_to_be_finished_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut_and_note(service: Service) -> None:
        await send(await join(service), full_part(1, random_rows(0), WHOLE))
        await asyncio.wrap_future(note_removal(log_of(service), "clicks"))

    run(tmp_path, cut_and_note)

    async def start_without_room() -> None:
        async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
            with monkeypatch.context() as patch:
                no_room(patch)
                service = Service(ServiceOptions(data_dir=tmp_path), tasks)
                await service.recover()
                assert service.volumes.trouble
            assert not service.models
            await publish(service, run="run-2", started=2)  # It is made anew.
            assert service.models["clicks"].position.number == 1
            await service.drain()

    asyncio.run(start_without_room())
