"""Races and failures inside the service, without sockets: what must hold whichever comes first."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, publish_open, random_rows

from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.errors import Contradiction, DeltasyncError, StorageFailed, Superseded
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds import frozen_release as releases
from deltasync.feeds import model as models
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.publish.opening import check_open
from deltasync.publish.session import PublishSession, open_session
from deltasync.service.housekeeping import housekeeping
from deltasync.service.service import Service, ServiceOptions
from deltasync.status.report import report
from deltasync.storage import model_store
from deltasync.storage.log import Log, LogOptions

Scenario = Callable[[Service], Coroutine[Any, Any, None]]


@asynccontextmanager
async def opened(data_dir: Path, **settings: Any) -> AsyncIterator[Service]:
    async with asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir, **settings), tasks)
        await service.recover()
        try:
            yield service
        finally:
            await service.drain()


def run(data_dir: Path, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), opened(data_dir, **settings) as service:
            await scenario(service)

    asyncio.run(main())


async def join(service: Service, **fields: Any) -> PublishSession:
    return await open_session(service.coordinator("clicks"), check_open(publish_open(**fields).open))


async def send(session: PublishSession, requests: list[Any]) -> Position | None:
    position = None
    for request in requests:
        if request.HasField("close"):
            position = await session.close(request.close)
        else:
            await session.add(request.chunk)
    return position


class Held:
    """Holds back what goes to the log as `name`, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.begun = asyncio.Event()
        self._let_go = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        original = getattr(Log, name)

        def held(log: Log, *arguments: Any) -> Future[None]:
            self.begun.set()

            async def later() -> None:
                await self._let_go.wait()
                await asyncio.wrap_future(original(log, *arguments))

            return asyncio.run_coroutine_threadsafe(later(), self._loop)

        patch.setattr(Log, name, held)

    def let_go(self) -> None:
        self._let_go.set()


def test_a_run_that_takes_over_while_a_cut_is_sealed_is_not_taken_for_its_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its changed rows alone would be accepted, on top of another run's."""

    async def scenario(service: Service) -> None:
        sealing = Held(monkeypatch, "seal")
        old = await join(service)
        last = asyncio.create_task(send(old, full_part(5, random_rows(0), WHOLE)))
        await sealing.begun.wait()
        new = await join(service, run="run-2", started=2)
        delta = part(5, [(0, [1], np.ones((1, 4), "<f4"))])
        with pytest.raises(Superseded, match="step 5 is just being sealed"):
            await send(new, delta)
        sealing.let_go()
        await last
        (seal,) = service.log.seals("clicks")
        assert (seal.run, seal.world_size) == ("run-1", 1)
        assert not new.decision.yes
        with pytest.raises(DeltasyncError, match="publish every row first"):
            await send(new, delta)

    run(tmp_path, scenario)


def test_a_rank_that_cannot_continue_publishes_everything_whatever_the_others_claim(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        first = await join(service)
        position = await send(first, full_part(1, random_rows(0), WHOLE))
        shards = [[WHOLE[0]], [WHOLE[1]]]
        ranks = [
            await join(
                service, run="run-2", started=2, world_size=2, rank=rank, shards=shards[rank], continues=claim
            )
            for rank, claim in enumerate([position, None])
        ]
        waiting = asyncio.create_task(send(ranks[0], part(2, [])))
        with pytest.raises(DeltasyncError, match="rank 1 sent only changed rows"):
            await send(ranks[1], part(2, []))
        sealed = await send(ranks[1], full_part(2, random_rows(1), shards[1]))
        assert await waiting == sealed

    run(tmp_path, scenario)


def test_a_cut_given_up_while_its_last_part_reaches_the_disk_stays_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(service: Service) -> None:
        shards = [[WHOLE[0]], [WHOLE[1]]]
        ranks = [await join(service, world_size=2, rank=rank, shards=shards[rank]) for rank in range(2)]
        rows = random_rows(0)
        with monkeypatch.context() as patch:
            appending = Held(patch, "append")
            slow = asyncio.create_task(send(ranks[0], full_part(1, rows, shards[0])))
            await appending.begun.wait()
        other = asyncio.create_task(send(ranks[1], full_part(2, rows, shards[1])))
        await asyncio.sleep(0)
        appending.let_go()
        with pytest.raises(Superseded, match="cut of step 1: abandoned for the cut of step 2"):
            await slow
        assert not service.log.seals("clicks")
        position = await send(ranks[0], full_part(2, rows, shards[0]))
        assert await other == position == Position(ranks[0].sealed.history, 1)

    run(tmp_path, scenario)


def test_a_part_of_which_a_record_is_not_on_disk_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Log.append

    def first_chunk_fails(
        log: Log, model: str, version: int, rank: int, number: int, *payload: Any
    ) -> Future[None]:
        if number != 1:
            return append(log, model, version, rank, number, *payload)
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the log is full"))
        return failed

    async def scenario(service: Service) -> None:
        session = await join(service)
        with monkeypatch.context() as patch:
            patch.setattr(Log, "append", first_chunk_fails)
            with pytest.raises(StorageFailed, match="the log is full"):
                await send(session, full_part(1, random_rows(0), WHOLE))
        assert not service.log.seals("clicks")
        again = await join(service)
        assert await send(again, full_part(1, random_rows(0), WHOLE)) == Position(again.sealed.history, 1)

    run(tmp_path, scenario)


def test_an_ack_while_lag_is_counted_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a cut or a new table: the report is of one moment."""

    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
        coordinator = service.coordinator("clicks")
        await coordinator.drain()
        consumer = await service.registry.create("c", "clicks", Policy())
        held = Position(session.sealed.history, 1)
        replica = service.registry.connect(consumer, "p", asyncio.Event())
        other = service.registry.connect(consumer, "q", asyncio.Event())
        service.registry.acknowledge(consumer, other, held)
        counting = coordinator.model.count_changed_since

        async def meanwhile(version: int, tables: Any) -> list[int]:
            counts = await counting(version, tables)
            service.registry.acknowledge(consumer, replica, Position(session.sealed.history, 2))
            await join(service, tables=[TableSpec("another", 3, 1)], shards=[])
            return counts

        monkeypatch.setattr(coordinator.model, "count_changed_since", meanwhile)
        lag = await report(consumer, coordinator.model, None)
        assert (lag.offset, lag.lag.rows, len(lag.tables)) == (0, 70, 2)
        assert [(line.offset, line.lag.rows) for line in lag.replicas] == [(0, 70), (1, 1)]

    run(tmp_path, scenario)


def test_consumers_made_at_the_same_time_are_one(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        made = await asyncio.gather(
            service.registry.create("c", "one", Policy()),
            service.registry.create("c", "two", Policy()),
            return_exceptions=True,
        )
        assert isinstance(made[1], Contradiction)
        assert service.registry.get("c") is made[0]
        assert service.log.meta("consumer/")["c"]["model"] == "one"

    run(tmp_path, scenario)


def test_what_a_crash_left_of_a_deleted_consumer_is_ignored(tmp_path: Path) -> None:
    log = Log(LogOptions(directory=tmp_path / "log", max_bytes=1 << 20))
    for name, meta in {
        "consumer/a": {"model": "m", "created_unix_ns": 1},
        "offset/a/p": {"history": "h", "version": 3, "acked_unix_ns": 5},
        "offset/ab/p": {"history": "h", "version": 4, "acked_unix_ns": 5},
    }.items():
        log.put_meta(name, meta).result(20)

    async def load() -> ConsumerRegistry:
        return ConsumerRegistry(log, 10)

    registry = asyncio.run(load())
    assert list(registry.consumers) == ["a"]
    (replica,) = registry.consumers["a"].replicas.values()
    assert (replica.name, replica.applied, replica.acked_unix_ns, replica.stream) == (
        "p",
        Position("h", 3),
        5,
        None,
    )
    log.close()


def test_offsets_come_back_and_replicas_have_time_to(tmp_path: Path) -> None:
    """After a restart nobody is connected: that alone is no reason to forget anybody."""

    async def first(service: Service) -> None:
        consumer = await service.registry.create("c", "clicks", Policy())
        for name, version in (("p", 3), ("q", 5)):
            replica = service.registry.connect(consumer, name, asyncio.Event())
            replica.acked_unix_ns = 1
            service.registry.acknowledge(consumer, replica, Position("h", version + 1))

    async def second(service: Service) -> None:
        service.registry.forget_the_gone()
        consumer = service.registry.get("c")
        assert {name: replica.applied for name, replica in consumer.replicas.items()} == {
            "p": Position("h", 4),
            "q": Position("h", 6),
        }
        for replica in consumer.replicas.values():
            replica.away_since_unix_ns = 1
        consumer.replicas["q"].acked_unix_ns = 0
        service.registry.forget_the_gone()
        assert list(consumer.replicas) == ["p"]

    async def third(service: Service) -> None:
        assert list(service.registry.get("c").replicas) == ["p"]

    for scenario in (first, second, third):
        run(tmp_path, scenario)


def test_a_flush_cuts_the_log_and_what_is_left_is_enough(tmp_path: Path) -> None:
    rows = random_rows(0)

    async def first(service: Service) -> None:
        session = await join(service)
        for step in (1, 2):
            await send(session, full_part(step, rows, WHOLE))
        model = service.model("clicks")
        await service.coordinator("clicks").drain()
        assert model.should_flush(1)
        await asyncio.gather(*(asyncio.to_thread(model.flush) for _ in range(3)))
        assert not model.should_flush(1)
        assert not list(service.log.records("clicks", 1))
        assert not list(service.log.records("clicks", 2))
        assert [seal.version for seal in service.log.seals("clicks")] == [1, 2]

    async def second(service: Service) -> None:
        model = service.model("clicks")
        assert model.position.number == 2
        for table, expected in zip(model.tables, rows, strict=True):
            np.testing.assert_array_equal(table.rows, expected)

    run(tmp_path, first)
    run(tmp_path, second)


def test_many_small_cuts_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes never add up, but a seal that is no longer kept cannot be applied again."""
    for module in (models, model_store):
        monkeypatch.setattr(module, "KEPT_SEALS", 4)

    async def scenario(service: Service) -> None:
        session = await join(service)
        model = service.model("clicks")
        await send(session, full_part(1, random_rows(0), WHOLE))
        assert not model.should_flush(1 << 30)
        await send(session, part(2, []))
        assert model.should_flush(1 << 30)

    run(tmp_path, scenario)


def test_a_flush_that_fails_is_tried_again_and_nothing_else_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltasync.service.housekeeping._SECONDS", 0.001)
    failed_again, flushed = asyncio.Event(), asyncio.Event()
    truncate, tries = Log.truncate, list[str]()

    async def scenario(service: Service) -> None:
        loop = asyncio.get_running_loop()

        def full(*_: Any) -> Future[None]:
            tries.append(caplog.text)
            if len(tries) == 2:
                loop.call_soon_threadsafe(failed_again.set)
            raise StorageFailed("the log is full")

        def works(log: Log, *arguments: Any) -> Future[None]:
            loop.call_soon_threadsafe(flushed.set)
            return truncate(log, *arguments)

        monkeypatch.setattr(Log, "truncate", full)
        keeper = asyncio.create_task(housekeeping(service))
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await failed_again.wait()
        assert "model clicks is flushed again later: the log is full" in tries[1]
        monkeypatch.setattr(Log, "truncate", works)
        await flushed.wait()
        keeper.cancel()
        assert (await send(session, part(2, []))) == Position(session.sealed.history, 2)

    run(tmp_path, scenario, flush_bytes=1)


def test_a_flush_meanwhile_does_not_forget_a_new_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write down which tables there are: who has read last must write last."""
    extra = TableSpec("extra", 2, 1)
    put_meta = Log.put_meta
    joining: list[Future[PublishSession]] = []

    async def first(service: Service) -> None:
        loop = asyncio.get_running_loop()
        await send(await join(service), full_part(1, random_rows(0), WHOLE))
        await service.coordinator("clicks").drain()

        def slow(log: Log, *arguments: Any) -> Future[None]:
            if not joining:
                another = join(service, run="run-2", started=2, tables=[extra], shards=[])
                joining.append(asyncio.run_coroutine_threadsafe(another, loop))
                # It either overtakes what is written here, or has to wait for it.
                wait(joining, 0.2)
            return put_meta(log, *arguments)

        monkeypatch.setattr(Log, "put_meta", slow)
        await asyncio.to_thread(service.model("clicks").flush)
        await asyncio.wrap_future(joining[0])

    async def second(service: Service) -> None:
        tables = service.model("clicks").tables
        assert [each.spec for each in tables] == [WHOLE[0].table, WHOLE[1].table, extra]

    run(tmp_path, first)
    run(tmp_path, second)


def test_what_was_not_sealed_is_dropped_at_the_start(tmp_path: Path) -> None:
    async def first(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await send(session, part(2, [(0, [1], np.ones((1, 4), "<f4"))])[:-1])

    async def second(service: Service) -> None:
        assert list(service.log.records("clicks", 2)) == []
        assert service.model("clicks").position.number == 1

    run(tmp_path, first)
    run(tmp_path, second)


def test_replicas_that_lack_the_same_share_one_release(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await service.coordinator("clicks").drain()
        model = service.model("clicks")
        first, second = model.release(0), model.release(0)
        assert (await first) is (await second)
        other = model.release(1)
        assert (await other).rows == 0
        assert other is not first

    run(tmp_path, scenario)


def test_two_models_do_not_mix(tmp_path: Path) -> None:
    async def first(service: Service) -> None:
        for model, seed in (("clicks", 0), ("click", 1)):
            opening = check_open(publish_open(model=model).open)
            session = await open_session(service.coordinator(model), opening)
            await send(session, full_part(1, random_rows(seed), WHOLE))

    async def second(service: Service) -> None:
        for model, seed in (("clicks", 0), ("click", 1)):
            for table, expected in zip(service.model(model).tables, random_rows(seed), strict=True):
                np.testing.assert_array_equal(table.rows, expected)

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_table_that_finds_no_room_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def scenario(service: Service) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with pytest.raises(StorageFailed, match="No space left on device"):
                await join(service)
        assert service.model("clicks").tables == []
        assert service.coordinator("clicks").sessions == {}
        # Another shape of the same table: nothing of the failed try is in the way.
        small = TableSpec(WHOLE[0].table.name, 5, 1)
        session = await join(service, tables=[small], shards=[Shard.whole(small)])
        assert await send(session, part(1, [(0, range(5), np.ones((5, 1), "<f4"))], full=True))

    run(tmp_path, scenario)


def test_tables_that_are_not_written_down_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else cuts of theirs would be acknowledged, and be gone after a restart."""
    rows = random_rows(0)

    def fails(*_: Any) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the log is full"))
        return failed

    async def first(service: Service) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Log, "put_meta", fails)
            with pytest.raises(StorageFailed, match="the log is full"):
                await join(service)
        assert service.model("clicks").tables == []
        assert not [path for path in (tmp_path / "models").rglob("*") if path.is_file()]
        await send(await join(service), full_part(1, rows, WHOLE))

    async def second(service: Service) -> None:
        for table, expected in zip(service.model("clicks").tables, rows, strict=True):
            np.testing.assert_array_equal(table.rows, expected)

    run(tmp_path, first)
    run(tmp_path, second)


def test_tables_are_written_down_even_if_the_rank_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, making, go = random_rows(0), threading.Event(), threading.Event()
    allocate = os.posix_fallocate

    def slow(*arguments: int) -> None:
        making.set()
        assert go.wait(20)
        allocate(*arguments)

    async def first(service: Service) -> None:
        monkeypatch.setattr(os, "posix_fallocate", slow)
        gone = asyncio.create_task(join(service))
        await asyncio.to_thread(making.wait)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        go.set()
        await send(await join(service), full_part(1, rows, WHOLE))

    async def second(service: Service) -> None:
        for table, expected in zip(service.model("clicks").tables, rows, strict=True):
            np.testing.assert_array_equal(table.rows, expected)

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_new_table_is_published_whole_whichever_rank_brought_it(tmp_path: Path) -> None:
    """Also by a rank that finds it made already, and after a restart in between."""
    rows, heads = random_rows(0), list[Position]()
    shards = [[Shard(USER, 0, 40, 0, 4), Shard(ITEM, 0, 15, 0, 6)], [Shard(ITEM, 15, 15, 0, 6)]]

    async def joined(service: Service, rank: int) -> PublishSession:
        claim = heads[0]
        return await join(
            service, run="run-2", started=2, world_size=2, rank=rank, shards=shards[rank], continues=claim
        )

    async def first(service: Service) -> None:
        session = await join(service, tables=[USER], shards=WHOLE[:1])
        heads.append(await send(session, full_part(1, rows, WHOLE[:1])) or Position())
        for rank in (0, 1):
            decision = (await joined(service, rank)).decision
            assert (decision.yes, decision.reason) == (False, f"no row of table {ITEM.name!r} was ever published")

    async def second(service: Service) -> None:
        ranks = [await joined(service, rank) for rank in (0, 1)]
        with pytest.raises(DeltasyncError, match="publish every row first"):
            await send(ranks[1], part(2, []))
        cut = [send(session, full_part(2, rows, held)) for session, held in zip(ranks, shards, strict=True)]
        await asyncio.gather(*cut)
        assert all(session.decision.yes for session in ranks)
        delta = [send(session, part(3, [])) for session in ranks]
        assert {position.number for position in await asyncio.gather(*delta) if position} == {3}

    async def third(service: Service) -> None:
        session = await join(service, run="run-3", started=3, continues=Position(heads[0].history, 3))
        assert session.decision.yes

    for scenario in (first, second, third):
        run(tmp_path, scenario)


def test_what_parts_open_with_counts_as_bytes_of_the_log(tmp_path: Path) -> None:
    """With many tables it is more than the rows."""
    tables = [TableSpec(f"{'long' * 100}{number}", 1, 1) for number in range(50)]

    async def scenario(service: Service) -> None:
        session = await join(service, tables=tables, shards=[Shard.whole(table) for table in tables])
        whole = part(1, [(slot, [0], np.ones((1, 1), "<f4")) for slot in range(50)], full=True)
        await send(session, whole)
        model = service.model("clicks")
        before = model.seals[-1].log_bytes
        await send(session, part(2, [(0, [0], np.ones((1, 1), "<f4"))]))
        assert model.seals[-1].bytes == 12
        assert model.seals[-1].log_bytes > 50 * 400
        logged = [record for version in (1, 2) for *_, record in service.log.records("clicks", version)]
        assert before + model.seals[-1].log_bytes == sum(len(record) for record in logged)

    run(tmp_path, scenario)


def test_a_full_log_is_flushed_and_takes_parts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.service.housekeeping._SECONDS", 0.001)
    monkeypatch.setattr(models.Model, "should_flush", lambda *_: False)
    wide = TableSpec("wide", 1 << 14, 4)
    rows = np.ones((wide.rows, wide.dim), "<f4")

    async def scenario(service: Service) -> None:
        fields: dict[str, Any] = {"tables": [wide], "shards": [Shard.whole(wide)]}
        session, step = await join(service, **fields), 0

        async def publish_on() -> None:
            nonlocal step
            while True:
                step += 1
                await send(session, part(step, [(0, range(wide.rows), rows)], full=True))

        with pytest.raises(StorageFailed, match="the log is full"):
            await publish_on()
        assert service.log.refusing
        keeper = asyncio.create_task(housekeeping(service))
        while service.log.refusing:
            await asyncio.sleep(0.001)
        position = await send(await join(service, **fields), part(step, [(0, range(wide.rows), rows)], full=True))
        assert position
        assert position.number == step
        keeper.cancel()

    run(tmp_path, scenario, log_max_bytes=2 << 20, flush_bytes=1)


def test_releases_share_the_memory_there_is_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spilled(release: FrozenRelease) -> bool:
        return any(isinstance(values, np.memmap) for *_, values in release.tables)

    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await send(session, full_part(2, random_rows(1), WHOLE))
        await service.coordinator("clicks").drain()
        model = service.model("clicks")
        first = await model.release(0)
        monkeypatch.setattr(releases, "RELEASES_IN_MEMORY_BYTES", 2 * first.memory_bytes - 1)
        second = await model.release(1)
        assert (spilled(first), spilled(second), second.memory_bytes) == (False, True, 0)
        del first
        gc.collect()
        assert not spilled(await model.release(0))

    run(tmp_path, scenario)


def test_an_offset_that_could_not_be_kept_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("the disk is gone"))
        return failed

    async def scenario(service: Service) -> None:
        consumer = await service.registry.create("c", "clicks", Policy())
        with monkeypatch.context() as patch:
            patch.setattr(Log, "put_meta", fails)
            replica = service.registry.connect(consumer, "p", asyncio.Event())
            service.registry.acknowledge(consumer, replica, Position("h", 3))

    run(tmp_path, scenario)
    assert "offset/c/p could not be written" in caplog.text
    assert "the disk is gone" in caplog.text
