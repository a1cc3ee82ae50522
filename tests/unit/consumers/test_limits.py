"""Names that peers give: so many of them, and none that outlives who gave it without ever holding anything."""

import asyncio
from pathlib import Path

import pytest
from tests.support.local_service import opened
from tests.unit.support.async_tests import in_loop, in_service

from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import LimitReached
from deltasync.core.events import line_of
from deltasync.core.limits import LimitOptions
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.service.service import Service


@in_service(limits=LimitOptions(consumers=2))
async def test_there_are_so_many_consumers(service: Service) -> None:
    for name in ("one", "two", "two"):
        await service.create_consumer(name, "clicks", Policy())
    with pytest.raises(LimitReached, match=r"consumers: at most 2 are allowed \(limit consumers\)"):
        await service.create_consumer("three", "clicks", Policy())
    await service.configuration.take([ConsumerOptions("three", "clicks")], "the settings")
    assert "limit consumers" in service.configuration.shortcomings["three"]
    await service.delete_consumer("one")
    await service.create_consumer("three", "clicks", Policy())


@in_service(limits=LimitOptions(replicas_per_consumer=2))
async def test_a_consumer_has_so_many_replicas(service: Service) -> None:
    registry = service.registry
    consumer, streams = await registry.create("c", "clicks", Policy()), [asyncio.Event() for _ in range(4)]
    replicas = [registry.connect(consumer, name, streams[0]) for name in ("one", "two")]
    with pytest.raises(LimitReached, match=r"at most 2 are allowed \(limit replicas_per_consumer\)"):
        registry.connect(consumer, "three", streams[1])
    registry.connect(consumer, "one", streams[2])  # One that is known may always come back.
    registry.disconnect(consumer, replicas[0], streams[2], "gone")
    registry.connect(consumer, "three", streams[1])


@in_service()
async def test_who_takes_the_name_of_a_replica_of_others_is_told_of(service: Service) -> None:
    registry, told = service.registry, list[str]()
    service.events.listen(lambda event: told.append(line_of(event)))
    consumer = await registry.create("c", "clicks", Policy())
    for by, instance in (("anna", "1"), ("anna", "1"), ("anna", "2"), ("bob", "3")):
        stream = asyncio.Event()
        replica = registry.connect(consumer, "r", stream, instance, by)
        registry.acknowledge(consumer, replica, Position("h", 1))
        if instance == "2":
            registry.disconnect(consumer, replica, stream, "gone")
    lines = [line for line in told if line.startswith("replica taken over: ")]
    said = ["it was that of anna, and is connected", "it was that of anna"]
    assert lines == [f"replica taken over: consumer=c replica=r {text}" for text in said]


@in_loop()
async def test_a_replica_that_has_held_nothing_leaves_no_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        registry = service.registry
        consumer = await registry.create("c", "clicks", Policy())
        for name in ("held", "nothing", "refused"):
            stream = asyncio.Event()
            replica = registry.connect(consumer, name, stream)
            registry.acknowledge(consumer, replica, Position("h", 3 if name == "held" else 0))
            if name == "held":  # Since when it holds nothing of what there is.
                registry.acknowledge(consumer, replica, Position("g", 0))
            registry.disconnect(consumer, replica, stream, "gone", expected=name == "refused")
        assert list(consumer.replicas) == ["held", "refused"]
    async with opened(tmp_path) as service:
        assert list(service.registry.get("c").replicas) == ["held", "refused"]
