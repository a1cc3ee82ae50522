"""Offsets on their way to the log: of each replica the newest one, some at a time; cuts do not wait for them."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_service import opened, publish
from tests.support.log import held_up, log_of
from tests.support.memory_store import MemoryDisk, MemoryStore
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import StorageFailed
from deltasync.base.events import Event, EventKind, Events
from deltasync.consumers import offsets
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.offsets import OffsetLog, pause_after, recorded_offsets
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.model.model import Model
from deltasync.service.service import Service

FLEET = 3000
AT = Position("h", 3)


class SlowStore(MemoryStore):
    """Has written what it was given when it is told so; `sizes` of what was submitted."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk, 1 << 20)
        self.sizes: list[int] = []
        self.pending: list[Future[None]] = []

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        super().put_all(records)
        self.sizes.append(len(records))
        self.pending.append(Future())
        return self.pending[-1]


def _offsets(service: Service) -> OffsetLog:
    return service.registry._offsets[log_of(service)]


async def fleet_of(service: Service, count: int) -> tuple[Consumer, list[Replica]]:
    consumer = await service.registry.create("c", "clicks", Policy())
    return consumer, [service.registry.connect(consumer, f"r{n}", asyncio.Event()) for n in range(count)]


async def test_acks_that_come_faster_than_the_disk_takes_them_are_not_kept(tmp_path: Path) -> None:
    """Two replicas that move without an end leave one write in the queue."""
    async with opened(tmp_path) as service:
        consumer, replicas = await fleet_of(service, 2)
        with held_up(log_of(service)):
            before = log_of(service).queue.bytes
            for number in range(5000):
                for replica in replicas:
                    service.registry.acknowledge(consumer, replica, Position("h", number))
            assert log_of(service).queue.bytes - before < 4096
    async with opened(tmp_path) as service:
        found = service.registry.get("c").replicas.values()
        assert [each.applied for each in found] == 2 * [Position("h", 4999)]


async def test_a_guest_is_forgotten_after_its_stream_and_never_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        consumer, [stays, goes, other] = await fleet_of(service, 3)
        stays.guest = goes.guest = True
        for replica in (stays, goes, other):
            service.registry.acknowledge(consumer, replica, AT)
        for replica in (goes, other):
            assert replica.stream
            service.registry.disconnect(consumer, replica, replica.stream, "its connection is lost", expected=True)
        assert set(consumer.replicas) == {stays.name, other.name}
    async with opened(tmp_path) as service:
        assert {each.name: each.applied for each in service.registry.get("c").replicas.values()} == {"r2": AT}


def test_a_cut_does_not_wait_for_the_offsets_of_a_fleet(tmp_path: Path) -> None:
    """However many replicas have moved, a few offsets are ahead of it."""
    written = list[str]()

    class Counted(LmdbStore):
        def _put(self, batch: Any, records: Mapping[str, bytes | None]) -> None:
            written.extend(records)
            super()._put(batch, records)

    log = Counted(LogOptions(directory=tmp_path))

    async def main() -> None:
        offset_log = OffsetLog(log, Events(), ())
        with held_up(log):
            for number in range(FLEET):
                offset_log.note("c", Replica(f"r{number}", Position("h", 1)))
            sealed = log.append("seals/m", 1, 0, 0, b"seal")
            ahead = list[int]()
            sealed.add_done_callback(lambda _: ahead.append(len(written)))
        await asyncio.wrap_future(sealed)
        assert ahead[0] <= offsets._AT_ONCE
        offset_log.write_all()

    asyncio.run(main())
    log.close()
    assert len(written) == FLEET


def test_offsets_take_a_tenth_of_the_time_and_wait_at_most_a_second() -> None:
    assert pause_after(0.0) == 0.0
    assert pause_after(0.02) == pytest.approx(0.18)
    assert pause_after(30.0) == 1.0


async def test_a_replica_that_left_before_it_was_written_down_is_never_written(tmp_path: Path) -> None:
    """Replicas that come and go leave nothing behind, not even the record that they are gone."""
    async with opened(tmp_path) as service:
        consumer, _ = await fleet_of(service, 0)
        with held_up(log_of(service)):
            service.registry.acknowledge(consumer, service.registry.connect(consumer, "a", asyncio.Event()), AT)
            for number in range(500):
                stream = asyncio.Event()
                replica = service.registry.connect(consumer, f"r{number}", stream)
                service.registry.acknowledge(consumer, replica, AT)
                service.registry.disconnect(consumer, replica, stream, "goodbye", forget=True)
    async with opened(tmp_path) as service:
        assert list(service.registry.get("c").replicas) == ["a"]


@in_service()
async def test_nothing_of_a_consumer_that_is_deleted_is_found_by_one_of_its_name(service: Service) -> None:
    """Not even of a replica that was forgotten just before, as far as the log does not know that yet."""
    consumer, (gone,) = await fleet_of(service, 1)
    service.registry.acknowledge(consumer, gone, AT)
    await asyncio.wrap_future(log_of(service).put("written", b""))  # So is what was submitted before.
    assert gone.stream
    service.registry.disconnect(consumer, gone, gone.stream, "goodbye", forget=True)
    await service.registry.delete("c")
    assert log_of(service).items("offset/") == {}


@in_service()
async def test_a_service_that_fails_at_its_end_has_written_its_offsets(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: Model) -> None:
        raise StorageFailed("the disk is full")

    await publish(service)
    consumer, (replica,) = await fleet_of(service, 1)
    _offsets(service)._resting = True
    service.registry.acknowledge(consumer, replica, AT)
    with monkeypatch.context() as patch:
        patch.setattr(Model, "stop", refused)
        with pytest.raises(StorageFailed, match="the disk is full"):
            await service.drain()
    await asyncio.wrap_future(log_of(service).put("written", b""))  # So is what was submitted before.
    assert list(log_of(service).items("offset/")) == ["c/r0"]


def test_offsets_that_could_not_be_written_are_told_once() -> None:
    told = list[Event]()

    async def main() -> None:
        log = SlowStore(MemoryDisk())
        offset_log = OffsetLog(log, Events(told.append), ())
        offset_log.note("c", Replica("first"))
        for number in range(50):
            offset_log.note("c", Replica(f"r{number}"))
        offset_log.write_all()
        assert log.sizes == [1, 50]
        for each in log.pending:
            each.set_exception(StorageFailed("the disk is gone"))
        while len(told) < 2:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [each.kind for each in told] == 2 * [EventKind.FAILED]
    assert told[0].text.startswith("could not be written;")
    assert told[1].text.startswith("could not be written with 49 others;")


class Steps:
    """What happens to the offsets of a few replicas, beside a plain dictionary."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.log = SlowStore(disk)
        self.offsets = OffsetLog(self.log, Events(), (), lambda _: 3600.0)  # A pause ends by `rest` alone.
        self.wanted, self.seen = dict[str, int](), dict[str, set[int]]()
        self.forgotten = 0  # Writes of these that are pending.

    def note(self, name: str, number: int) -> None:
        self.wanted[name] = number
        self.seen.setdefault(name, set()).add(number)
        self.offsets.note("c", Replica(name, Position("h", number)))

    def forget(self, name: str, _: int) -> None:
        self.wanted.pop(name, None)
        pending = len(self.log.pending)
        self.offsets.forget("c", name)
        self.forgotten += len(self.log.pending) - pending
        assert name not in recorded_offsets(self.log, "c")

    def forget_now(self, name: str, _: int) -> None:
        self.wanted.pop(name, None)
        MemoryStore.put_all(self.log, self.offsets.forgotten("c", name))
        assert name not in recorded_offsets(self.log, "c")

    def forget_all(self, *_: object) -> None:
        self.wanted.clear()
        MemoryStore.put_all(self.log, self.offsets.forgotten("c"))
        assert recorded_offsets(self.log, "c") == {}

    def write(self, *_: object) -> None:
        for each in self.log.pending:
            each.set_result(None)
        self.log.pending.clear()
        self.forgotten = 0

    def rest(self, *_: object) -> None:
        if not self.log.pending:
            self.offsets._go_on()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [Steps.note, Steps.forget, Steps.forget_now, Steps.forget_all, Steps.write, Steps.rest]
            ),
            st.sampled_from("abcde"),
            st.integers(1, 9),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_the_log_ends_with_the_newest_offsets_and_queues_one_of_each(
    steps: list[tuple[Callable[[Steps, str, int], None], str, int]], ends_well: bool
) -> None:
    """A kill loses only what was noted and not submitted yet: what there is, was true once."""
    disk = MemoryDisk()

    async def main() -> Steps:
        having = Steps(disk)
        for step, name, number in steps:
            step(having, name, number)
            await asyncio.sleep(0)
            assert len(having.offsets._moved) <= 5
            assert len(having.log.pending) - having.forgotten <= 1
        if ends_well:
            having.offsets.write_all()
        return having

    having = asyncio.run(main())
    found = {name: each.applied.number for name, each in recorded_offsets(having.log, "c").items()}
    assert all(number in having.seen[name] for name, number in found.items())
    if ends_well:
        assert found == having.wanted
