"""Models that ranks have opened and nothing is published of: whoever goes, fails or ends, nothing is left."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.crashes import Crashes
from tests.support.faults import Faults, Held, HeldWrites, refusing
from tests.support.local_service import faults_of, opened, publish, run, send
from tests.support.log import log_of
from tests.support.many_logs import ManyLogs
from tests.support.memory_bucket import MemoryBucket, MemoryStore
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, publish_open, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.access.limits import LimitOptions
from deltasync.base.errors import Contradiction, DeltasyncError, LimitReached, StorageFailed
from deltasync.cluster.bucket import ClusterOptions, Member
from deltasync.cluster.shared_owners import SharedOwners
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.messages import check_open
from deltasync.cuts.session import PublishSession, open_session
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service

HUGE = TableSpec("huge", 1 << 40, 1 << 10)
ROWS = random_rows(0)


@asynccontextmanager
async def stream(service: Service, **fields: Any) -> AsyncIterator[PublishSession]:
    """A rank's stream, as the API has it. With `tables`, it holds nothing of them unless it has `shards`."""
    fields = {"shards": []} | fields if "tables" in fields else fields
    opening = check_open(publish_open(**fields).open)
    coordinator = await service.publishing.open(opening.model)
    try:
        session = await open_session(coordinator, opening)
        try:
            yield session
        finally:
            session.end("its stream has ended")
    finally:
        service.publishing.leave(coordinator)


async def left(service: Service) -> None:
    """Once what is left behind is removed."""
    await service.publishing.removed()


def traces(service: Service) -> list[Any]:
    """What there is of any model: names, threads, files, records, streams."""
    checkpoints, log = service.options.data_dir / "checkpoints", log_of(service)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("model-")]
    records = [name for name in log.items("") if name.startswith(("model/", "removed/"))]
    taken = [taken for taken in service.limits.numbers.values() if taken]
    there: list[Any] = [*service.models, *service.models.coordinators, *service.models.opened.values(), *taken]
    return [*there, *threads, *records, *log.streams(), *checkpoints.rglob("*")]


def no_room(_: TableMemory, nbytes: int, what: str) -> None:
    raise StorageFailed(f"no room for {what}: it takes {nbytes} bytes, and 0 bytes of memory are free")


@pytest.mark.parametrize("number", [0, 3])
@in_service()
async def test_an_open_that_is_followed_by_nothing_leaves_nothing(service: Service, number: int) -> None:
    """Nor does one of which a part came, however much."""
    async with stream(service, world_size=2, shards=[WHOLE[0]]) as session:
        assert await asyncio.wait_for(send(session, full_part(1, ROWS, WHOLE[:1])[:number][:1]), 20) is None
        assert list(service.models.opened.values()) == [session.coordinator]
        assert not service.models
    await left(service)
    assert traces(service) == []
    await publish(service)
    assert list(service.models) == ["clicks"]


@in_service()
async def test_ranks_that_have_closed_their_parts_and_gone_leave_nothing(service: Service) -> None:
    async with stream(service, world_size=2, shards=[WHOLE[0]]) as session:
        closed = asyncio.create_task(send(session, full_part(1, ROWS, WHOLE[:1])))
        while not (cut := session.coordinator.open_cut) or not cut.cut.ends:
            await asyncio.sleep(0)
    with pytest.raises(DeltasyncError, match="all ranks of its run have left"):
        await closed
    await left(service)
    assert traces(service) == []


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ([HUGE], Contradiction, "all rows of its tables need"),
        ([USER, ITEM, TableSpec("third", 2, 2)], LimitReached, "limit tables_per_model"),
    ],
    ids=["log", "tables"],
)
@in_service(limits=LimitOptions(tables_per_model=2))
async def test_opens_that_are_refused_leave_nothing(
    service: Service, tables: list[TableSpec], error: Any, message: str
) -> None:
    """Nor do those of tables that are too large for memory, see `test_opens`."""
    for number in range(100):
        with pytest.raises(error, match=message):
            async with stream(service, model=f"m{number}", tables=tables):
                pass
    await left(service)
    assert traces(service) == []


@in_service(limits=LimitOptions(models=2, bytes_per_model=200_000, bytes_in_all=150_000))
async def test_limits_of_models_and_of_bytes_are_kept(service: Service) -> None:
    await publish(service)
    taken = service.limits.number("bytes_in_all")
    assert taken == service.models["clicks"].tables.nbytes > 0
    async with stream(service, model="second"):
        with pytest.raises(LimitReached, match=r"models: at most 2 are allowed \(limit models\)"):
            await service.publishing.open("third")
    with pytest.raises(LimitReached, match="limit bytes_in_all"):
        async with stream(service, model="second", tables=[replace(USER, rows=5000)]):
            pass
    with pytest.raises(LimitReached, match="limit bytes_per_model"):
        async with stream(service, model="second", tables=[replace(USER, rows=8000)]):
            pass
    assert service.limits.number("bytes_in_all") == taken


@in_service()
async def test_a_first_cut_without_memory_is_refused_and_comes_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stream(service) as session:
        with monkeypatch.context() as patch:
            patch.setattr(TableMemory, "check", no_room)
            with pytest.raises(StorageFailed, match=f"no room for table '{USER.name}'"):
                await send(session, full_part(1, ROWS, WHOLE))
        assert not service.volumes.trouble, "it has refused nothing"
        assert await send(session, full_part(1, ROWS, WHOLE))


async def test_ranks_that_leave_before_their_first_cut_remove_no_copies(tmp_path: Path) -> None:
    """It may be all that is left of a machine that was lost."""
    async with opened(tmp_path / "lost", checkpoints=str(tmp_path / "copies")) as service:
        await publish(service)
        await service.checkpoints.make("clicks")
    copies = sorted((tmp_path / "copies").rglob("*"))
    async with opened(tmp_path / "new", checkpoints=str(tmp_path / "copies")) as service:
        async with stream(service, world_size=2, shards=[WHOLE[0]]) as session:
            assert await send(session, full_part(1, ROWS, WHOLE[:1])[:1]) is None
        await left(service)
        assert traces(service) == []
    assert sorted((tmp_path / "copies").rglob("*")) == copies


@pytest.mark.parametrize("gone", ["before", "while"])
@in_service(housekeeping_seconds=0.001)
async def test_tables_of_a_cut_that_could_not_be_sealed_go_with_its_ranks(service: Service, gone: str) -> None:
    sealing, keeper = HeldWrites("seals/clicks"), asyncio.create_task(service.run())
    sealing.error = StorageFailed("the disk is gone")
    with faults_of(service).log.replaced(append=sealing):
        async with stream(service) as session:
            cut = asyncio.create_task(send(session, full_part(1, ROWS, WHOLE)))
            await sealing.has_begun()
            assert log_of(service).items("model/")
            assert service.limits.number("bytes_in_all")
            if gone == "before":
                sealing.let_go()
                await asyncio.wait([cut])
        sealing.let_go()
        with pytest.raises(StorageFailed, match="the disk is gone"):
            await cut
    while list(service.models.opened.values()):
        await asyncio.sleep(0.001)
    await left(service)
    keeper.cancel()
    assert traces(service) == []


async def publish_during_removal(service: Service, faults: Faults) -> None:
    """Publish a model while what its abandoned first cut wrote is being removed."""
    removing = Held("model/clicks")
    async with stream(service, world_size=2) as session:
        await send(session, full_part(1, ROWS, WHOLE)[:1])
        faults.log.hooks["put"] = removing
    await removing.has_begun()
    published = asyncio.create_task(publish(service))
    await asyncio.wait([published], timeout=0.05)
    assert not published.done()
    removing.let_go()
    await asyncio.wait_for(published, 10)
    assert service.models["clicks"].seals.newest_version == 1


async def test_who_opens_what_is_just_being_removed_waits_for_that(tmp_path: Path) -> None:
    """Otherwise the removal would delete its rows, too."""
    async with opened(tmp_path) as service:
        await publish_during_removal(service, faults_of(service))
    async with opened(tmp_path) as service:
        for table, rows in zip(service.models["clicks"].tables, random_rows(1), strict=True):
            np.testing.assert_array_equal(table.rows, rows)


@asynccontextmanager
async def sharing(folder: Path, logs: ManyLogs, **settings: Any) -> AsyncIterator[Service]:
    """A service on logs that other processes share, of which none is there."""
    async with asyncio.TaskGroup() as tasks:
        url = str(folder / "checkpoints")
        options = ServiceOptions(data_dir=folder / "a", checkpoints=url, **settings)
        service = Service(options, tasks, logs)
        me, bucket = Member("a", "", "", run="a"), MemoryBucket(MemoryStore())
        owners = SharedOwners(ClusterOptions(lease_seconds=6.0), me, bucket, service.hosting(logs), service.events)
        service.join(owners)
        await owners.start()
        try:
            while not owners.confirmed:
                await asyncio.sleep(0.001)
            yield service
        finally:
            await owners.close()
            await service.drain()


async def test_who_opens_what_a_shared_log_removes_waits_without_a_lock(tmp_path: Path) -> None:
    """The removal may wait for a seal that needs the lock."""
    logs = ManyLogs(tmp_path / "logs")
    async with sharing(tmp_path, logs) as service:
        await publish_during_removal(service, logs.faults)


@in_service()
async def test_ranks_that_contradict_each_other_are_refused_and_leave_nothing(service: Service) -> None:
    other = [replace(USER, rows=60), ITEM]
    async with stream(service, world_size=2):
        with pytest.raises(Contradiction, match="is 40 x 4 float32, the run has 60 x 4 float32"):
            async with stream(service, world_size=2, rank=1, tables=other):
                pass
    async with stream(service, world_size=2, rank=1, tables=other):
        pass  # Of what the other has said nothing is left.
    await left(service)
    assert traces(service) == []


def test_a_crash_at_any_point_of_the_first_cut_leaves_nothing_or_all_of_it(tmp_path: Path) -> None:
    data_dir, copies = tmp_path / "data", list[Path]()

    async def first(service: Service) -> None:
        crashes = Crashes(data_dir, tmp_path)
        with crashes.of(faults_of(service)):
            async with stream(service) as session:
                crashes.copy("after the open")
                *rows, close = full_part(1, ROWS, WHOLE)
                await send(session, rows)
                await asyncio.wrap_future(log_of(service).put("written", b""))
                await send(session, [close])
                crashes.copy("after the seal")
        copies.extend(crashes.copies)

    found = list[bool]()

    async def check(service: Service) -> None:
        found.append("clicks" in service.models)
        if found[-1]:
            for table, rows in zip(service.models["clicks"].tables, ROWS, strict=True):
                np.testing.assert_array_equal(table.rows, rows)
        else:
            assert traces(service) == []
        await publish(service, 2, run="run-2", started=2)

    run(data_dir, first)
    assert len(copies) >= 6
    for copy in copies:
        run(copy, check)
    assert found == sorted(found)
    assert found.count(True) >= 1
    assert found.count(False) >= 5


SHAPES = [TableSpec("t", 4, 2), TableSpec("t", 4, 3), TableSpec("t", 6, 2)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "begin", "publish", "fail", "restart"]),
        st.sampled_from(["one", "two"]),
        st.integers(0, len(SHAPES) - 1),
    ),
    max_size=10,
)


@given(STEPS)
def test_models_are_those_that_were_sealed_in_the_shape_that_was(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[str, str, int]]
) -> None:
    folder, plain, number = tmp_path_factory.mktemp("plain"), dict[str, TableSpec](), 0

    async def play(service: Service, what: str, name: str, shape: TableSpec) -> None:
        fields = {"model": name, "run": f"run-{number}", "started": number, "tables": [shape]}
        seals = {"append": refusing(StorageFailed("the disk is gone"), "seals/")} if what == "fail" else {}
        with suppress(Contradiction, StorageFailed), faults_of(service).log.replaced(**seals):
            async with stream(service, **fields, shards=[Shard.whole(shape)]) as session:
                values = np.ones((shape.rows, shape.dim), "<f4")
                messages = part(number, [(0, range(shape.rows), values)], full=True)
                await send(session, messages[: {"open": 0, "begin": 1}.get(what, 2)])
                if what == "publish":
                    plain[name] = shape
        await left(service)

    async def scenario() -> None:
        nonlocal number
        todo = list(steps)
        while todo:
            async with asyncio.timeout(20), opened(folder) as service:
                check(service)
                while todo:
                    number, (what, name, shape) = number + 1, todo.pop(0)
                    if what == "restart":
                        break
                    await play(service, what, name, SHAPES[shape])
                    check(service)

    def check(service: Service) -> None:
        there = {name: [each.spec for each in model.tables] for name, model in service.models.items()}
        for name, specs in there.items():
            (spec,) = specs
            assert replace(spec, rows=plain[name].rows) == plain[name]
            assert spec.rows >= plain[name].rows  # More, where a cut that grew it could not be sealed.
        assert there.keys() == plain.keys()
        assert {stream.partition("/")[2] for stream in log_of(service).streams()} <= plain.keys()
        assert not list(service.models.opened.values())

    asyncio.run(scenario())
