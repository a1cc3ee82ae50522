"""What replicas share: one freeze, one message, and the rows of a cut as they came."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from tests.support.local_service import join, publish, send
from tests.support.log import log_of
from tests.support.releases import frozen, live_rows
from tests.support.wire import USER, WHOLE, close, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.api.process import streams_of
from deltasync.api.subscribe import ReplicaStream
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.tables import Shard
from deltasync.cuts.session import PublishSession
from deltasync.model.model import Model
from deltasync.model.releases import FrozenRelease
from deltasync.service.service import Service
from deltasync.v1 import publish_pb2, subscribe_pb2
from deltasync.wire.row_messages import part_chunk, serialized

REPLICAS = 40


async def silence() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


async def chunks_until_end(stream: Any) -> list[bytes]:
    """The messages with rows up to the end of a release."""
    found = []
    async for response in stream:
        message = subscribe_pb2.SubscribeResponse.FromString(serialized(response))
        if message.HasField("chunk"):
            found.append(response)
        if message.HasField("release"):
            return [response for _ in message.release.rows]
        if message.HasField("release_end"):
            return found
    raise AssertionError("the stream has ended")


def changed(step: int, row: int) -> list[Any]:
    return part(step, [(0, [row], np.full((1, USER.dim), step, "<f4"))])


async def published(session: PublishSession, service: Service, requests: list[Any]) -> Model:
    """The model, once it has a cut."""
    await send(session, requests)
    await service.models.coordinators["clicks"].drain()
    return service.models["clicks"]


@in_service()
async def test_all_replicas_are_sent_the_same_objects(service: Service) -> None:
    """Rows are encoded once, in chunks or as those of a whole release. Each replica's end differs."""
    await service.consumers.create("plain", "clicks", Policy())
    session = await join(service)
    model = await published(session, service, full_part(1, random_rows(0), WHOLE))
    openings = [subscribe_pb2.SubscribeOpen(consumer="plain", replica=str(each)) for each in range(REPLICAS)]
    streams = [ReplicaStream(streams_of(service), opening).run(silence()) for opening in openings]
    for step, chunks in ((1, 2), (2, 1), (3, 1)):
        if step > 1:
            await published(session, service, changed(step, step))
        sent = await asyncio.gather(*map(chunks_until_end, streams))
        assert all(one == other for each in sent for one, other in zip(each, sent[0], strict=True))
        assert [len(each) for each in sent] == [chunks] * REPLICAS
        release = model.release(step - 1)
        assert release is model.release(step - 1)
        assert frozen(await release).table_rows is frozen(await model.release(step - 1)).table_rows
    for stream in streams:
        await stream.aclose()


@in_service()
async def test_a_cut_is_kept_for_replicas_only_while_some_follow(service: Service) -> None:
    session = await join(service)
    model = await published(session, service, full_part(1, random_rows(0), WHOLE))
    for step in (2, 3):  # Nobody has asked for the second: the third is not kept.
        await published(session, service, changed(step, step))
    release = frozen(await model.release(2))
    (kept,) = live_rows(release).values()
    assert (kept.ids.tolist(), release.head) == ([3], model.head)
    await published(session, service, changed(4, 4))
    newest = weakref.ref(frozen(await model.release(3)))
    gc.collect()
    found = newest()
    assert found is not None
    assert found is await model.release(3)
    assert found is not await model.release(2)
    assert found.checksums == frozen(await model.release(0)).checksums
    whole = await model.release(3, frozenset({1}))  # A table that is sent whole comes from the tables.
    assert {slot: len(rows) for slot, rows in live_rows(whole).items()} == {0: 1, 1: 30}
    del found
    await published(session, service, changed(5, 5))
    gc.collect()
    assert newest() is None


@in_service()
async def test_log_and_replicas_get_the_bytes_in_which_rows_arrived(service: Service) -> None:
    session = await join(service)
    model = await published(session, service, full_part(1, random_rows(0), WHOLE))
    await model.release(0)
    model.releases.followed = True
    rows = RowBatch(WHOLE[0], np.array([3, 7]), np.ones((2, USER.dim), "<f4")).digested()
    request = publish_pb2.PublishRequest.FromString(part_chunk(2, 0, rows))
    await published(session, service, [request, close(2, 2)])
    came = request.chunk.rows.rows.SerializeToString()
    (record,) = log_of(service).read("cuts/clicks", 2, 2)
    assert record.payload[-len(came) :] == came
    (chunk,) = frozen(await model.release(1)).chunks
    assert bytes(chunk.rows.encoded or b"") == came
    assert chunk.message.endswith(came)
    read = frozen(await model.release(0)).chunks[0]  # Of what it lacks, a replica that is behind gets the rows.
    assert read.rows.digests is None


@in_service()
async def test_a_cut_without_digests_goes_on_with_them(service: Service) -> None:
    """Also one that a whole part brings, and one of several ranks, whose rows go together."""
    halves = [Shard(USER, 0, 25, 0, USER.dim), Shard(USER, 25, USER.rows - 25, 0, USER.dim)]
    ranks = [
        await join(service, tables=[USER], shards=[half], rank=rank, world_size=2)
        for rank, half in enumerate(halves)
    ]
    values = random_rows(0)[0]

    async def cut(step: int, *rows: list[int]) -> FrozenRelease:
        parts = [part(step, [(0, some, values[some])], full=step == 1) for some in rows]
        await asyncio.gather(*(send(rank, each) for rank, each in zip(ranks, parts, strict=True)))
        await service.models.coordinators["clicks"].drain()
        return frozen(await service.models["clicks"].release(step - 1))

    await cut(1, list(range(25)), list(range(25, USER.rows)))
    for step in (2, 3):
        (chunk,) = (await cut(step, [3, 4], [30])).chunks
    assert chunk.rows.ids.tolist() == [3, 4, 30]
    assert chunk.rows.digests is not None
    chunk.rows.check_digests()


@in_service()
async def test_cuts_of_two_models_are_applied_at_once(service: Service) -> None:
    sessions, both = [await publish(service, model=name) for name in ("clicks", "views")], threading.Barrier(2)

    def meeting(_: Ids) -> None:
        both.wait(20)  # Broken if the other is not under way.

    for each in service.models.values():
        each.tables[0].before_change.append(meeting)
    await asyncio.gather(*(send(each, changed(2, 3)) for each in sessions))
    assert [each.position.number for each in service.models.values()] == [2, 2]
    assert not any(each.failure for each in service.models.values())


@in_service()
async def test_a_small_cut_is_one_write_to_the_disk(service: Service) -> None:
    session, commits = await publish(service), log_of(service).commits
    before = sum(commits.read()[0])
    await send(session, changed(2, 3))
    assert sum(commits.read()[0]) == before + 1
