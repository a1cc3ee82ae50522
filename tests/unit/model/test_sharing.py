"""What replicas share: one freeze, one message, and the rows of a cut as they came."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, run, send
from tests.support.releases import frozen, live_rows
from tests.support.wire import USER, WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.api.subscribe import ReplicaStream
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.cuts.session import PublishSession
from deltasync.log.lmdb_store import LmdbStore
from deltasync.model import releases
from deltasync.model.model import Model
from deltasync.model.releases import freeze
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2
from deltasync.wire.row_messages import release_chunk, serialized

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
            return [rows.SerializeToString() for rows in message.release.rows]
        if message.HasField("release_end"):
            return found
    raise AssertionError("the stream has ended")


def changed(step: int, row: int) -> list[Any]:
    return part(step, [(0, [row], np.full((1, USER.dim), step, "<f4"))])


async def published(session: PublishSession, service: Service, requests: list[Any]) -> Model:
    """The model, once it has a cut."""
    await send(session, requests)
    await service.coordinators["clicks"].drain()
    return service.models["clicks"]


def test_forty_replicas_cost_one_freeze_and_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written once; where they go with the end of the release, in a copy for each replica."""

    async def scenario(service: Service) -> None:
        written = list[int]()
        made = list[int]()

        def counted(slot: int, rows: RowBatch) -> bytes:
            written.append(slot)
            return release_chunk(slot, rows)

        def noted(*arguments: Any) -> Any:
            made.append(arguments[1])
            return freeze(*arguments)

        monkeypatch.setattr("deltasync.model.releases.release_chunk", counted)
        monkeypatch.setattr(releases, "freeze", noted)
        await service.create_consumer("plain", "clicks", Policy())
        session = await join(service)
        await published(session, service, full_part(1, random_rows(0), WHOLE))
        openings = [subscribe_pb2.SubscribeOpen(consumer="plain", replica=str(each)) for each in range(REPLICAS)]
        streams = [ReplicaStream(service, opening).run(silence()) for opening in openings]
        for step, chunks in ((1, 2), (2, 1), (3, 1)):
            if step > 1:
                await published(session, service, changed(step, step))
            sent = await asyncio.gather(*map(chunks_until_end, streams))
            assert len(written) == chunks
            assert all(one == other for each in sent for one, other in zip(each, sent[0], strict=True))
            assert [len(each) for each in sent] == [chunks] * REPLICAS
            written.clear()
        assert made == [0]  # Later cuts were sent as they came.
        for stream in streams:
            await stream.aclose()

    run(tmp_path, scenario)


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
async def test_cuts_of_two_models_are_applied_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    both, apply = threading.Barrier(2), Model._apply

    def meeting(model: Model, seal: Seal, rows: Any) -> None:
        both.wait(20)  # Broken if the other is not under way.
        apply(model, seal, rows)

    monkeypatch.setattr(Model, "_apply", meeting)
    for name in ("clicks", "views"):
        await send(await join(service, model=name), full_part(1, random_rows(0), WHOLE))
    for name in ("clicks", "views"):
        await service.coordinators[name].drain()
        assert service.models[name].position.number == 1


@in_service()
async def test_a_small_cut_is_one_write_to_the_disk(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    commits, commit = list[int](), LmdbStore._commit

    def counted(log: LmdbStore, batch: Any) -> None:
        commits.append(len(batch))
        commit(log, batch)

    session = await join(service)
    await published(session, service, full_part(1, random_rows(0), WHOLE))
    monkeypatch.setattr(LmdbStore, "_commit", counted)
    await send(session, changed(2, 3))
    assert commits == [3]  # What may be left of a part that broke off, its rows, and the seal.
