"""Tables that have grown in a later run: old rows stay, a crash leaves one size or the other, and who is refused
harms nobody."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.crashes import Crashes
from tests.support.local_service import faults_of, join, opened, publish, run, send
from tests.support.log import log_of
from tests.support.wire import ITEM, TABLES, USER, WHOLE, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, ResyncRequired, StorageFailed
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.session import PublishSession
from deltasync.model.model import Model
from deltasync.service.service import Service

GROWN = [replace(USER, rows=60), ITEM]
NEW = TableSpec("another", 7, 2)


def grown_part(step: int, tables: Sequence[TableSpec]) -> list[Any]:
    rows = random_rows(step, tables)
    return part(step, [(slot, np.arange(len(some)), some) for slot, some in enumerate(rows)], full=True)


async def join_later(
    service: Service, tables: Sequence[TableSpec], number: int = 2, **fields: Any
) -> PublishSession:
    shards = [Shard.whole(table) for table in tables]
    return await join(service, run=f"run-{number}", started=number, tables=tables, shards=shards, **fields)


async def publish_later(
    service: Service, tables: Sequence[TableSpec], number: int = 2, **fields: Any
) -> PublishSession:
    return await publish(service, number, run=f"run-{number}", started=number, tables=tables, **fields)


async def grow_without_seal(service: Service, tables: Sequence[TableSpec]) -> None:
    """Have tables made, or made larger, for a cut that does not fit into the log then."""
    later, log = await join_later(service, tables), log_of(service)
    rows, capacity = grown_part(2, tables), log.capacity
    await send(later, rows[:-1])
    assert later.coordinator.open_cut
    log.capacity = later.coordinator.open_cut.cut.log_bytes
    with pytest.raises(StorageFailed, match="the log is full"):
        await send(later, rows[-1:])
    log.capacity = capacity


def tables_of(model: Model) -> dict[str, tuple[int, list[int], bytes]]:
    """Rows, stamps and values of each table."""
    return {
        table.spec.name: (table.spec.rows, table.stamps.tolist(), table.rows.tobytes()) for table in model.tables
    }


@in_service()
async def test_forms_are_computed_again_only_for_grown_tables(service: Service) -> None:
    """Every replica looks at it with every release, of thousands of tables."""
    await publish(service)
    model = service.models["clicks"]
    before = list(model.forms)
    assert all(each is again for each, again in zip(before, model.forms, strict=True))
    changes, grow = model.tables.changes, threading.Event()
    model.submit(grow.wait, 20)
    growing = asyncio.create_task(publish_later(service, GROWN))
    while model.tables.changes == changes:
        await asyncio.sleep(0)
    assert model.forms == before, "read while the tables grow"
    grow.set()
    await growing
    assert [each.spec for each in before] == TABLES
    assert [each.spec for each in model.forms] == GROWN


async def test_rows_of_a_grown_table_are_unpublished_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await publish(service)
        await grow_without_seal(service, GROWN)
    async with opened(tmp_path) as service:
        model = service.models["clicks"]
        assert [table.spec for table in model.tables] == GROWN
        later = await join_later(service, GROWN, continues=model.position)
        for step, ids in {2: [3], 3: [3, *range(41, 60)]}.items():
            with pytest.raises(ResyncRequired, match=r"of its 20 rows of table .*user' that were never published"):
                await send(later, part(step, [(0, ids, np.ones((len(ids), 4), "<f4"))]))
        await send(later, part(4, [(0, [3, *range(40, 60)], np.ones((21, 4), "<f4"))]))
        await service.models.coordinators["clicks"].drain()
        assert model.tables[0].stamps.tolist() == [*[1] * 3, 2, *[1] * 36, *[2] * 20], "and no other row"
    async with opened(tmp_path) as service:
        model = service.models["clicks"]
        later = await join_later(service, GROWN, 3, continues=model.position)
        assert await send(later, part(5, []))


@pytest.mark.parametrize(
    "tables",
    [
        [replace(USER, rows=39), ITEM],
        [replace(USER, rows=60), replace(ITEM, rows=29)],
        [replace(USER, dim=5), ITEM],
        [NEW, replace(ITEM, dtype=np.dtype("<f4"))],
    ],
)
@in_service()
async def test_who_is_refused_harms_nobody(service: Service, tmp_path: Path, tables: list[TableSpec]) -> None:
    session = await publish(service)
    model = service.models["clicks"]
    before, files = tables_of(model), {path: path.stat().st_size for path in tmp_path.rglob("*")}
    with pytest.raises(
        Contradiction, match=r"publish it under another model \(SyncOptions\(model=...\), --model NAME\)"
    ):
        await join_later(service, tables)
    assert tables_of(model) == before
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == files
    assert await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))])), "the run before goes on"


@in_service()
async def test_where_there_is_no_room_nothing_has_grown(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageFailed("No space left on device")

    await publish(service)
    before = tables_of(service.models["clicks"])
    for name in ("core.table_memory.TableMemory.zeros", "model.model_store.pack_json"):
        with monkeypatch.context() as patch:
            patch.setattr(f"deltasync.{name}", full)
            with pytest.raises(StorageFailed, match="No space left on device"):
                await publish_later(service, [*GROWN, NEW])
        assert tables_of(service.models["clicks"]) == before
    await publish_later(service, [*GROWN, NEW])
    assert [table.spec for table in service.models["clicks"].tables] == [*GROWN, NEW]


async def test_of_a_table_that_was_never_published_another_may_come(tmp_path: Path) -> None:
    """It was made for a cut that could not be sealed."""
    wanted = [*TABLES, replace(NEW, rows=5, dim=3)]
    async with opened(tmp_path) as service:
        await publish(service)
        await grow_without_seal(service, [*TABLES, NEW])
        model = service.models["clicks"]
        assert [table.spec for table in model.tables] == [*TABLES, NEW]
        await publish_later(service, wanted, 3)
        assert [table.spec for table in model.tables] == wanted
        assert service.limits.number("bytes_in_all") == model.tables.nbytes
    async with opened(tmp_path) as service:
        for table, rows in zip(service.models["clicks"].tables, random_rows(3, wanted), strict=True):
            np.testing.assert_array_equal(table.rows, rows)


def test_a_crash_at_any_point_leaves_the_old_tables_or_the_new_ones(tmp_path: Path) -> None:
    """Some rows of before are in a checkpoint, others only in the log."""
    data_dir, copies = tmp_path / "data", list[Path]()
    before, after = dict[str, object](), dict[str, object]()
    later = [replace(USER, rows=5000), ITEM, NEW, replace(WHOLE[1].table, name="more")]

    async def grow(service: Service) -> None:
        session = await publish(service)
        await service.checkpoints.make("clicks")
        await send(session, part(2, [(0, [39], np.ones((1, 4), "<f4"))]))
        await service.models.coordinators["clicks"].drain()
        before.update(tables_of(service.models["clicks"]))
        crashes = Crashes(data_dir, tmp_path)
        with crashes.of(faults_of(service)):
            await grow_without_seal(service, later)
        after.update(tables_of(service.models["clicks"]))
        copies.extend(crashes.copies)

    found = []

    async def check(service: Service) -> None:
        model = service.models["clicks"]
        state = tables_of(model)
        assert state in (before, after)
        found.append(state == after)
        session = await join_later(service, later)
        await send(session, grown_part(3, later))
        await service.models.coordinators["clicks"].drain()
        for table, rows in zip(model.tables, random_rows(3, later), strict=True):
            np.testing.assert_array_equal(table.rows, rows)

    run(data_dir, grow)
    for copy in copies:
        run(copy, check)
    assert found == sorted(found), "once it has grown it stays so"
    assert set(found) == {False, True}
