"""Streams of replicas that are replaced while they wait for a model, or say more than they were told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.local_service import join, publish, run, send
from tests.support.wire import WHOLE, ack, full_part, random_rows, subscribe_open

from deltasync.api import subscribe
from deltasync.api.subscribe import ReplicaStream
from deltasync.core.errors import DeltasyncError, NotFound, Superseded
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2


async def nothing() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


@pytest.mark.parametrize(("now", "error"), [("replaced", Superseded), ("deleted", NotFound)])
def test_one_that_was_replaced_or_deleted_says_nothing_more_and_moves_no_offset(
    tmp_path: Path, now: str, error: type[DeltasyncError]
) -> None:
    async def scenario(service: Service) -> None:
        registry, consumer = service.registry, await service.create_consumer("predictors", "clicks", Policy())
        responses = ReplicaStream(service, subscribe_open().open).run(nothing())
        await anext(responses)  # Progress, which is still being sent.
        await publish(service)
        if now == "replaced":
            (name,) = consumer.replicas
            replica = registry.connect(consumer, name, asyncio.Event())
            held = Position(service.models["clicks"].history, 1)
            registry.acknowledge(consumer, replica, held)
        else:
            await service.delete_consumer("predictors")
        with pytest.raises(error):
            await anext(responses)
        if now == "replaced":
            assert replica.applied == held

    run(tmp_path, scenario)


FLOOD = 10_000


def test_a_flood_of_acks_stays_with_who_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read, gRPC does not take from the peer either."""
    monkeypatch.setattr(subscribe, "_PACE_SECONDS", 3600.0)
    read = 0

    async def flood() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
        nonlocal read
        for _ in range(FLOOD):
            read += 1
            yield ack()
        await asyncio.Event().wait()

    async def scenario(service: Service) -> None:
        await send(await join(service), full_part(1, random_rows(0), WHOLE))
        await service.create_consumer("predictors", "clicks", Policy())
        responses = ReplicaStream(service, subscribe_open().open).run(flood())
        for _ in range(2):  # That it is opened, and the release.
            await anext(responses)
        for _ in range(100):
            await asyncio.sleep(0)
        assert 32 <= read <= 32 + 2 * 2 + 1
        await responses.aclose()

    run(tmp_path, scenario)
