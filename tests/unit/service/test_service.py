# mypy: disable-error-code="union-attr, operator"
"""Races and failures inside the service, without sockets: what must hold whichever comes first."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from tests.support.faults import failing
from tests.support.local_service import backups, faults_of, join, opened, publish, run, send, sources
from tests.support.log import log_of
from tests.support.wire import part
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, DeltasyncError, ServiceUnavailable, StorageFailed
from deltasync.base.events import Events
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import EmbeddedLogs, LogOptions
from deltasync.log.records import pack_json, unpack_json
from deltasync.service.service import Service
from deltasync.status.lag import report
from deltasync.status.process import checks, not_ready


@in_service()
async def test_an_ack_while_lag_is_counted_does_no_harm(service: Service) -> None:
    """Nor does a cut or a new table: the report is of one moment."""
    session = await publish(service)
    await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
    coordinator = service.models.coordinators["clicks"]
    await coordinator.drain()
    consumer = await service.registry.create("c", "clicks", Policy())
    held = Position(session.sealed.history, 1)
    replica = service.registry.connect(consumer, "p", asyncio.Event())
    other = service.registry.connect(consumer, "q", asyncio.Event())
    service.registry.acknowledge(consumer, other, held)
    newest = service.registry.connect(consumer, "r", asyncio.Event())
    service.registry.acknowledge(consumer, newest, Position(session.sealed.history, 2))
    before, status = consumer.copy(), coordinator.model.status(consumer.policy)
    service.registry.acknowledge(consumer, replica, Position(session.sealed.history, 2))
    await send(session, part(3, [(0, [3, 4], np.ones((2, 4), "<f4"))]))
    await coordinator.drain()
    await join(service, tables=[TableSpec("another", 3, 1)], shards=[])
    lag = report(before, status, time.time_ns())
    assert (lag.offset, lag.lag.rows, len(lag.tables)) == (0, 70, 2)
    assert lag.head == 2
    # Rows are counted when they are asked for; whoever had the newest version had it.
    assert [(line.offset, line.lag.rows) for line in lag.replicas] == [(0, 70), (1, 2), (2, 0)]


@in_service()
async def test_consumers_made_at_the_same_time_are_one(service: Service) -> None:
    made = await asyncio.gather(
        service.registry.create("c", "one", Policy()),
        service.registry.create("c", "two", Policy()),
        return_exceptions=True,
    )
    assert isinstance(made[1], Contradiction)
    assert service.registry.get("c") is made[0]
    assert unpack_json(log_of(service).items("consumer/")["c"])["model"] == "one"


def test_what_a_crash_left_of_a_deleted_consumer_is_ignored(tmp_path: Path) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=1 << 20))
    offset = {"history": "h", "number": 3, "seal": 9, "acked_unix_ns": 5}
    for name, meta in {
        "consumer/a": {"model": "m", "created_unix_ns": 1, "policy": {}},
        "offset/a/p": offset,
        "offset/ab/p": offset,
    }.items():
        log.put(name, pack_json(meta)).result(20)

    async def load() -> ConsumerRegistry:
        return ConsumerRegistry(EmbeddedLogs(log), 10, Events())

    (consumer,) = asyncio.run(load()).consumers.values()
    (replica,) = consumer.replicas.values()
    found = (replica.name, replica.applied, replica.acked_unix_ns, replica.stream)
    assert (consumer.name, *found) == ("a", "p", Position("h", 3), 5, None)
    log.close()


async def test_offsets_come_back_and_replicas_have_time_to(tmp_path: Path) -> None:
    """After a restart nobody is connected: that alone is no reason to forget anybody."""
    async with opened(tmp_path) as service:
        consumer = await service.registry.create("c", "clicks", Policy())
        for name, version in (("p", 3), ("q", 5)):
            replica = service.registry.connect(consumer, name, asyncio.Event())
            replica.acked_unix_ns = 1
            service.registry.acknowledge(consumer, replica, Position("h", version + 1))
    async with opened(tmp_path) as service:
        service.registry.forget_the_gone()
        consumer = service.registry.get("c")
        assert {name: replica.applied for name, replica in consumer.replicas.items()} == {
            "p": Position("h", 4),
            "q": Position("h", 6),
        }
        for replica in consumer.replicas.values():
            replica.since_ns = -(10**18)
        consumer.replicas["q"].acked_unix_ns = 0
        service.registry.forget_the_gone()
        assert list(consumer.replicas) == ["p"]
    async with opened(tmp_path) as service:
        assert list(service.registry.get("c").replicas) == ["p"]


@in_service(log_max_bytes=2 << 20)
async def test_a_log_that_was_full_takes_parts_again_after_a_checkpoint(service: Service) -> None:
    wide = TableSpec("wide", 1 << 13, 4)
    rows = np.ones((wide.rows, wide.dim), "<f4")
    fields: dict[str, Any] = {"tables": [wide], "shards": [Shard.whole(wide)]}
    session, step = await join(service, **fields), 0

    async def publish_on() -> None:
        nonlocal step
        while True:
            step += 1
            await send(session, part(step, [(0, range(wide.rows), rows)], full=True))

    with pytest.raises(StorageFailed, match="the log is full until a checkpoint is written"):
        await publish_on()
    assert log_of(service).refusing
    checkpoints = asyncio.create_task(service.checkpoints.run())
    while log_of(service).refusing:
        await asyncio.sleep(0.001)
    position = await send(await join(service, **fields), part(step, [(0, range(wide.rows), rows)], full=True))
    assert position
    assert position.number == step
    checkpoints.cancel()


@in_service(checkpoint_retry_seconds=0.001)
async def test_a_log_stays_full_until_a_checkpoint_is_written(service: Service) -> None:
    await publish(service)
    log_of(service).refusing = True
    checkpoints = asyncio.create_task(service.checkpoints.run())
    with faults_of(service).place.replaced(put=failing(PlaceFailed("no space"))):
        while service.checkpoints.failures < 3:
            await asyncio.sleep(0.001)
        assert log_of(service).refusing
        assert not_ready(checks(sources(service))).endswith("; checkpoints of model 'clicks': no space")
    while log_of(service).refusing:
        await asyncio.sleep(0.001)
    checkpoints.cancel()


def test_a_process_among_others_makes_no_backup(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        service.models.storage.shared = True
        with pytest.raises(Contradiction, match="checkpoints are at the URL of --checkpoints"):
            await backups(service).make(str(tmp_path / "backup"), "test")

    run(tmp_path / "data", scenario)
    assert not (tmp_path / "backup").exists()


@in_service()
async def test_a_consumer_of_the_configuration_is_about_to_be_made_until_it_is(service: Service) -> None:
    """A replica that is told that there is none stops for good."""
    asked = list[DeltasyncError | None]()
    create = service.registry.create

    async def slow(name: str, model: str, policy: Policy) -> Any:
        asked.append(service.registry.elsewhere(name))
        return await create(name, model, policy)

    service.registry.create = slow  # type: ignore[method-assign]
    wanted = ConsumerOptions("fleet", "clicks")
    await service.consumers.configure([wanted], "test")
    assert [type(each) for each in asked] == [ServiceUnavailable]
    assert service.registry.elsewhere("fleet") is None
    service.registry.create = AsyncMock(side_effect=StorageFailed("brokers do not answer"))  # type: ignore[method-assign]
    with pytest.raises(StorageFailed):
        await service.consumers.configure([replace(wanted, name="later")], "test")
    assert isinstance(service.registry.elsewhere("later"), ServiceUnavailable)
    service.registry.create = create  # type: ignore[method-assign]
    await service.consumers.configure_again()
    assert service.registry.get("later").model == "clicks"
