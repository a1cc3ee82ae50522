"""Tables in scratch files (--table-memory): they mean nothing after a restart, and a folder may have no room."""

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_service import join, opened, publish, send, sources, view_of
from tests.support.volumes import small_volume
from tests.support.wire import part, random_rows

from deltasync.base.errors import StorageFailed
from deltasync.base.events import event_line
from deltasync.core.policy import Policy
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.cuts.session import PublishSession
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.process import checks, not_ready

WIDE = TableSpec("wide", 1 << 16, 8)
MIB = 1 << 20


async def publish_wide(service: Service, step: int = 1) -> PublishSession:
    """A run that publishes every row of the table, in pieces."""
    session = await join(service, run=f"run-{step}", started=step, tables=[WIDE], shards=[Shard.whole(WIDE)])
    (rows,) = random_rows(step, [WIDE])
    pieces = np.array_split(np.arange(WIDE.rows), 8)
    await send(session, part(step, [(0, ids, rows[ids]) for ids in pieces], full=True))
    await session.coordinator.settled()
    return session


def mapped_bytes(folder: Path) -> int:
    """Bytes of files of a folder that this process has mapped; they have no name any more."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if len(line) > 5 and line[5].startswith(f"{folder}/")]
    return sum(int(end, 16) - int(first, 16) for first, end in spans)


async def released(service: Service, consumer: str) -> bytes:
    """What replicas of a consumer with a policy are given."""
    view = view_of(service, consumer)
    while not view.position.number:
        await asyncio.sleep(0.001)
    (table,) = view.state.tables
    return await view.model.on_thread(table.held.rows.tobytes)


async def test_nothing_in_the_folder_counts_after_a_restart(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    policy = Policy(value_type=ValueType.FP16)
    async with opened(tmp_path / "data", table_memory=scratch) as service:
        session = await publish_wide(service)
        service.registry.connect(await service.consumers.create("half", "clicks", policy), "r", asyncio.Event())
        view = await released(service, "half")
        assert mapped_bytes(scratch) >= 2 * MIB + MIB  # The rows of the model, and those of the view.
        assert list(scratch.iterdir()) == []
        await service.checkpoints.make("clicks")
        await send(session, part(2, [(0, [7], np.ones((1, 8), "<f4"))]))
        await session.coordinator.settled()
    (rows,) = random_rows(1, [WIDE])
    rows[7] = 1
    shutil.rmtree(scratch)
    for folder in (tmp_path / "another", None):
        async with opened(tmp_path / "data", table_memory=folder) as service:
            (table,) = service.models["clicks"].tables
            np.testing.assert_array_equal(table.rows, rows)
            assert await released(service, "half") == view
            assert folder is None or mapped_bytes(folder)


async def test_where_there_is_no_room_tables_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with small_volume(16 * MIB) as volume:
        scratch = volume / "scratch"
        async with opened(tmp_path, table_memory=scratch) as service:
            await publish_wide(service)
            wider = replace(WIDE, name="wider", rows=1 << 19)
            for model, run in (("clicks", "later"), ("another", "first")):
                with pytest.raises(
                    StorageFailed, match=rf"no room for .* bytes, and .* bytes on the volume of {scratch} are free"
                ):
                    await join(service, model=model, run=run, started=2, tables=[WIDE, wider], shards=[])
            assert list(service.models) == ["clicks"]
            await publish_wide(service, 3)
            assert service.models["clicks"].position.number == 2


async def test_a_model_without_memory_at_the_start_waits_and_others_do_not(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "data") as service:
        await publish(service, model="small")
        await publish_wide(service)
    with small_volume(16 * MIB) as volume:
        filler, told = volume / "filler", list[str]()
        filler.write_bytes(bytes(14 * MIB))
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            service = Service(ServiceOptions(data_dir=tmp_path / "data", table_memory=volume), tasks)
            service.events.listen(lambda each: told.append(event_line(each)))
            recovery = asyncio.create_task(service.recovery.all())
            while len([each for each in told if "failed: model=clicks" in each]) < 2:
                await asyncio.sleep(0.001)
            assert list(service.models) == ["small"]
            said = "model 'clicks' is still recovering: no room for table 'wide': it takes .* are free: make room"
            assert re.match(said, not_ready(checks(sources(service))))
            filler.unlink()
            await recovery
            rows = service.models["clicks"].tables[0].rows
            np.testing.assert_array_equal(rows, random_rows(1, [WIDE])[0])
            del rows
            assert not_ready(checks(sources(service))) == ""
            await service.drain()
