"""A stream that another one of its replica has replaced, while it waited for the model to be there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.local_service import publish, run
from tests.support.wire import subscribe_open

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
def test_it_says_nothing_more_and_moves_no_offset(tmp_path: Path, now: str, error: type[DeltasyncError]) -> None:
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
