"""Who only asks changes nothing: no model, thread, folder or record comes of it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast

from tests.support.local_service import opened, publish, sources
from tests.support.log import log_of
from tests.unit.support.async_tests import in_service

from deltasync.api.process import streams_of
from deltasync.api.subscribe import ReplicaStream, Responses
from deltasync.core.policy import Policy
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.v1 import subscribe_pb2
from deltasync.wire.row_messages import serialized


async def ask(service: Service, consumer: str) -> str:
    answers = Answers(sources(service))
    await answers.metrics()
    return (await answers.consumer(consumer)).state


async def silence() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    """What a replica says that has nothing to say."""
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


async def next_kind(stream: Responses) -> str | None:
    """What the next message is."""
    return subscribe_pb2.SubscribeResponse.FromString(serialized(await anext(stream))).WhichOneof("message")


async def subscribe(service: Service, consumer: str) -> None:
    """A replica asks for what there is, is told that there is nothing yet, and leaves."""
    opening = subscribe_pb2.SubscribeOpen(consumer=consumer, replica="r")
    stream = ReplicaStream(streams_of(service), opening).run(silence())
    assert await next_kind(stream) == "progress"
    assert await ask(service, consumer) == "empty"
    await cast("AsyncGenerator[Any, None]", stream).aclose()


@in_service()
async def test_a_consumer_of_a_misspelt_model_makes_no_model(service: Service, tmp_path: Path) -> None:
    for name, policy in {"plain": Policy(), "top": Policy(top_k=1)}.items():
        await service.consumers.create(name, "clikcs", policy)
        assert await ask(service, name) == "empty"
        await subscribe(service, name)
        assert await ask(service, name) == "empty"
    assert not service.models
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("model-clikcs")]
    assert not (tmp_path / "checkpoints").exists()
    kinds = {name.partition("/")[0] for name in log_of(service).items("")}
    assert kinds <= {"data-format", "consumer", "offset"}


@in_service()
async def test_a_consumer_created_before_its_model_is_fed_once_it_is_published(service: Service) -> None:
    consumer = await service.consumers.create("top", "clicks", Policy(top_k=1))
    plain = await service.consumers.create("plain", "clicks", Policy())

    async def fed_at_once() -> object:
        await service.models.added.changed()
        return service.consumers.feed(consumer)

    fed = asyncio.create_task(fed_at_once())
    await asyncio.sleep(0)
    await publish(service)
    assert service.consumers.feed(plain) is service.models["clicks"]
    assert await fed is service.views.get(consumer) is not None
    assert await ask(service, "top") == "empty"


@in_service(progress_seconds=1000.0)
async def test_what_is_published_while_a_replica_is_told_to_wait_wakes_it(service: Service) -> None:
    await service.consumers.create("plain", "clicks", Policy())
    opening = subscribe_pb2.SubscribeOpen(consumer="plain", replica="r")
    stream = ReplicaStream(streams_of(service), opening).run(silence())
    kinds = [await next_kind(stream)]
    await publish(service)
    while kinds[-1] != "release":
        kinds.append(await next_kind(stream))
    assert kinds == ["progress", "opened", "release"]
    await cast("AsyncGenerator[Any, None]", stream).aclose()


async def test_a_restart_finds_the_views_of_models_there_are_and_no_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await service.consumers.create("early", "later", Policy(top_k=1))
        await service.consumers.create("top", "clicks", Policy(top_k=1))
        await publish(service)
    async with opened(tmp_path) as service:
        assert list(service.models) == ["clicks"]
        assert service.views.get(service.registry.get("early")) is None
        assert service.views.get(service.registry.get("top")) is not None
