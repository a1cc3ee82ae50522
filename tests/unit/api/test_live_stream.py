"""Streams on which clients send `Alive`, in a loop whose time passes only while everybody waits."""

import asyncio
import selectors
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from deltasync.api.live_stream import LiveStream
from deltasync.v1 import publish_pb2, tables_pb2

OPEN = publish_pb2.PublishRequest(open=publish_pb2.PublishOpen())
ALIVE = publish_pb2.PublishRequest(alive=tables_pb2.Alive())
CLOSE = publish_pb2.PublishRequest(close=publish_pb2.PartClose())


class Clock(selectors.DefaultSelector):
    """A selector that does not wait for a timeout, but adds it to the time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0
        return super().select(0)


class Context:
    """A stream without a client behind it."""

    async def write(self, response: object) -> None:
        pass


def seconds_until_close(busy_seconds: float, alives: int) -> float:
    """The time that a message waits behind `Alive` ones, after the service was busy with the first message."""
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]

    async def requests() -> AsyncIterator[publish_pb2.PublishRequest]:
        for each in (OPEN, *[ALIVE] * alives, CLOSE):
            yield each

    alive = publish_pb2.PublishResponse(alive=tables_pb2.Alive(within_seconds=15))
    stream = LiveStream[publish_pb2.PublishRequest](cast("Any", Context()), requests(), alive)
    waited = list[float]()

    async def answers() -> AsyncGenerator[publish_pb2.PublishResponse, None]:
        await anext(stream)
        yield publish_pb2.PublishResponse()
        await asyncio.sleep(busy_seconds)
        began = clock.now
        assert await anext(stream) == CLOSE
        waited.append(clock.now - began)

    try:
        loop.run_until_complete(stream.answer(answers()))
    finally:
        loop.close()
    return waited[0]


def test_a_message_does_not_wait_for_alives_of_a_busy_time() -> None:
    """A rank sends one every 5 s while its cut waits for another rank."""
    assert seconds_until_close(3600, 3600 // 5) == 0


def test_a_client_that_sends_too_many_alives_slows_itself_down() -> None:
    assert seconds_until_close(0, 1000) > 10
