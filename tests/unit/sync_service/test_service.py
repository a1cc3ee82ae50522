"""Races and failures inside the service, without sockets: what must hold whichever comes first."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sync_service import model as models
from sync_service import service as services
from sync_service.consumers.registry import Registry
from sync_service.consumers.report import report
from sync_service.errors import Contradiction, DeltasyncError, StorageFailed, Superseded
from sync_service.log import Log, LogOptions
from sync_service.mapped import MappedTable
from sync_service.publishing import PublishSession, check_open
from sync_service.service import Service, ServiceOptions
from sync_service.tables import Position, Shard, Table
from tests.support.wire import WHOLE, full_part, part, publish_open, random_rows

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
    return await service.publishing_of("clicks").join(check_open(publish_open(**fields).open))


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
        assert await other == position == Position(ranks[0].head.history, 1)

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
        assert await send(again, full_part(1, random_rows(0), WHOLE)) == Position(again.head.history, 1)

    run(tmp_path, scenario)


def test_an_ack_while_lag_is_counted_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a cut or a new table: the report is of one moment."""

    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        publishing = service.publishing_of("clicks")
        await publishing.drain()
        consumer = await service.registry.create("c", "clicks")
        held = Position(session.head.history, 1)
        replica = service.registry.connect(consumer, "p", Position(), asyncio.Event())
        counting = publishing.model.count_changed_since

        async def meanwhile(version: int, tables: Any) -> list[int]:
            counts = await counting(version, tables)
            service.registry.acknowledge(consumer, replica, held)
            await join(service, tables=[Table("another", 3, 1)], shards=[])
            return counts

        monkeypatch.setattr(publishing.model, "count_changed_since", meanwhile)
        lag = await report(consumer, publishing.model)
        assert (lag.offset, lag.replicas[0].offset, lag.lag.rows, len(lag.tables)) == (0, 0, 70, 2)

    run(tmp_path, scenario)


def test_consumers_made_at_the_same_time_are_one(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        made = await asyncio.gather(
            service.registry.create("c", "one"), service.registry.create("c", "two"), return_exceptions=True
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

    async def load() -> Registry:
        return Registry(log, 10)

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
        consumer = await service.registry.create("c", "clicks")
        for name, version in (("p", 3), ("q", 5)):
            replica = service.registry.connect(consumer, name, Position("h", version), asyncio.Event())
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
        model = service.publishing_of("clicks").model
        await service.publishing_of("clicks").drain()
        assert model.should_flush(1)
        await asyncio.gather(*(asyncio.to_thread(model.flush) for _ in range(3)))
        assert not model.should_flush(1)
        assert not list(service.log.records("clicks", 1))
        assert not list(service.log.records("clicks", 2))
        assert [seal.version for seal in service.log.seals("clicks")] == [1, 2]

    async def second(service: Service) -> None:
        model = service.publishing_of("clicks").model
        assert model.position.version == 2
        for table, expected in zip(model.tables, rows, strict=True):
            np.testing.assert_array_equal(table.rows, expected)

    run(tmp_path, first)
    run(tmp_path, second)


def test_many_small_cuts_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes never add up, but a seal that is no longer kept cannot be applied again."""
    monkeypatch.setattr(models, "KEPT_SEALS", 4)

    async def scenario(service: Service) -> None:
        session = await join(service)
        model = service.publishing_of("clicks").model
        await send(session, full_part(1, random_rows(0), WHOLE))
        assert not model.should_flush(1 << 30)
        await send(session, part(2, []))
        assert model.should_flush(1 << 30)

    run(tmp_path, scenario)


def test_a_flush_that_fails_is_tried_again_and_nothing_else_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "_HOUSEKEEPING_SECONDS", 0.001)
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
        housekeeping = asyncio.create_task(service.housekeeping())
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await failed_again.wait()
        assert "model clicks is flushed again later: the log is full" in tries[1]
        monkeypatch.setattr(Log, "truncate", works)
        await flushed.wait()
        housekeeping.cancel()
        assert (await send(session, part(2, []))) == Position(session.head.history, 2)

    run(tmp_path, scenario, flush_bytes=1)


def test_a_flush_meanwhile_does_not_forget_a_new_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write down which tables there are."""
    extra = Table("extra", 2, 1)
    flush = MappedTable.flush

    async def first(service: Service) -> None:
        loop = asyncio.get_running_loop()
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await service.publishing_of("clicks").drain()

        def slow(table: MappedTable) -> None:
            flush(table)
            joined = asyncio.run_coroutine_threadsafe(
                join(service, run="run-2", started=2, tables=[extra], shards=[]), loop
            )
            joined.result(20)

        monkeypatch.setattr(MappedTable, "flush", slow)
        await asyncio.to_thread(service.publishing_of("clicks").model.flush)
        monkeypatch.setattr(MappedTable, "flush", flush)

    async def second(service: Service) -> None:
        assert [each.table.name for each in service.publishing_of("clicks").model.tables][-1] == "extra"

    run(tmp_path, first)
    run(tmp_path, second)


def test_replicas_that_lack_the_same_share_one_release(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await service.publishing_of("clicks").drain()
        model = service.publishing_of("clicks").model
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
            session = await service.publishing_of(model).join(opening)
            await send(session, full_part(1, random_rows(seed), WHOLE))

    async def second(service: Service) -> None:
        for model, seed in (("clicks", 0), ("click", 1)):
            for table, expected in zip(service.publishing_of(model).model.tables, random_rows(seed), strict=True):
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
        assert service.publishing_of("clicks").model.tables == []
        assert service.publishing_of("clicks").sessions == {}
        # Another shape of the same table: nothing of the failed try is in the way.
        small = Table(WHOLE[0].table.name, 5, 1)
        session = await join(service, tables=[small], shards=[Shard.whole(small)])
        assert await send(session, part(1, [(0, range(5), np.ones((5, 1), "<f4"))], full=True))

    run(tmp_path, scenario)
