"""Streams of replicas: those that are replaced, say more than they were told, or are sent large releases."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, publish, run, send
from tests.support.wire import USER, WHOLE, ack, decoded, full_part, part, random_rows, subscribe_open

from deltasync.api.process import streams_of
from deltasync.api.subscribe import ReplicaStream
from deltasync.base.errors import DeltasyncError, NotFound, ServiceUnavailable, Superseded
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.model import releases
from deltasync.model.releases import copied
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2
from deltasync.wire.row_messages import serialized


async def nothing() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


@pytest.mark.parametrize(("now", "error"), [("replaced", Superseded), ("deleted", NotFound)])
def test_a_replaced_or_deleted_stream_moves_no_offset(
    tmp_path: Path, now: str, error: type[DeltasyncError]
) -> None:
    async def scenario(service: Service) -> None:
        registry, consumer = service.registry, await service.consumers.create("predictors", "clicks", Policy())
        responses = ReplicaStream(streams_of(service), subscribe_open().open).run(nothing())
        await anext(responses)  # Progress, which is still being sent.
        await publish(service)
        if now == "replaced":
            (name,) = consumer.replicas
            replica = registry.connect(consumer, name, asyncio.Event())
            held = Position(service.models["clicks"].history, 1)
            registry.acknowledge(consumer, replica, held)
        else:
            await service.consumers.delete("predictors")
        with pytest.raises(error):
            await anext(responses)
        if now == "replaced":
            assert replica.applied == held

    run(tmp_path, scenario)


FLOOD = 10_000


def test_a_flood_of_acks_stays_with_who_sends_it(tmp_path: Path) -> None:
    """What is not read, gRPC does not take from the peer either."""
    read = 0

    async def flood() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
        nonlocal read
        for _ in range(FLOOD):
            read += 1
            yield ack()
        await asyncio.Event().wait()

    async def scenario(service: Service) -> None:
        await send(await join(service), full_part(1, random_rows(0), WHOLE))
        await service.consumers.create("predictors", "clicks", Policy())
        responses = ReplicaStream(streams_of(service), subscribe_open().open).run(flood())
        for _ in range(2):  # That it is opened, and the release.
            await anext(responses)
        for _ in range(100):
            await asyncio.sleep(0)
        assert 32 <= read <= 32 + 2 * 2 + 1
        await responses.aclose()

    run(tmp_path, scenario, ack_pace_seconds=3600.0)


async def acks_of(requests: "asyncio.Queue[subscribe_pb2.SubscribeRequest]") -> AsyncIterator[Any]:
    while True:
        yield await requests.get()


def message_of(response: Any) -> subscribe_pb2.SubscribeResponse:
    return subscribe_pb2.SubscribeResponse.FromString(serialized(response))


def test_rows_of_a_large_release_are_read_as_the_replica_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that it holds in the end are of the version that is there by then."""
    read = list[int]()

    def noted(*arguments: Any) -> Any:
        read.append(len(arguments[2]))
        return copied(*arguments)

    async def scenario(service: Service) -> None:
        session = await publish(service)
        await service.consumers.create("predictors", "clicks", Policy())
        requests = asyncio.Queue[subscribe_pb2.SubscribeRequest]()
        responses = ReplicaStream(streams_of(service), subscribe_open(budget=1).open).run(acks_of(requests))
        assert message_of(await anext(responses)).HasField("opened")
        rows, received, taken = np.zeros((USER.rows, USER.dim), "<f4"), 0, 0
        while not (message := message_of(await anext(responses))).HasField("release_end"):
            some = decoded(message.chunk.rows)
            if message.chunk.rows.slot == 0:
                rows[some.ids] = some.values
            received += some.nbytes
            taken += len(some)
            assert sum(read) - taken < 20, "no block ahead"
            if len(read) == 2:
                await send(session, part(2, [(0, [3], np.full((1, USER.dim), 7, "<f4"))]))
                await session.coordinator.settled()
            await requests.put(ack(received))
        assert message.release_end.position.version == 2
        assert rows.tobytes() == service.models["clicks"].tables[0].rows.tobytes()
        assert (rows[3] == 7).all()
        await responses.aclose()

    monkeypatch.setattr(releases, "copied", noted)
    run(tmp_path, scenario, release_memory_bytes=0, release_block_bytes=10 * USER.row_bytes)


@pytest.mark.parametrize("large", [True, False])
def test_a_stream_ends_with_the_reason_where_rows_do_not_fit_their_digests(tmp_path: Path, large: bool) -> None:

    async def scenario(service: Service) -> None:
        await publish(service)
        await service.consumers.create("predictors", "clicks", Policy())
        model = service.models["clicks"]
        model.tables[0].rows.view(np.uint8)[15, 0] ^= 1
        responses = ReplicaStream(streams_of(service), subscribe_open().open).run(nothing())
        sent = list[int]()

        async def take_all() -> None:
            async for response in responses:
                sent.extend(decoded(message_of(response).chunk.rows).ids.tolist())

        with pytest.raises(ServiceUnavailable, match=r"model 'clicks' .* reloaded.* in row 15\)") as refused:
            await take_all()
        assert "row 15" not in refused.value.text, "who may not read is not told"
        assert 15 not in sent
        assert "row 15" in model.tables.failed

    memory_bytes = 0 if large else 1 << 20
    run(tmp_path, scenario, release_memory_bytes=memory_bytes, release_block_bytes=10 * USER.row_bytes)
