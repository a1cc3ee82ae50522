"""A client's stream, on which each side shows the other that it lives."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Generic, Self, TypeVar

import grpc.aio

from deltasync.access.roles import current_call
from deltasync.wire.row_messages import MESSAGES_IN_TIME, is_alive

Request = TypeVar("Request")
# Number of `Alive` to accept at once for each third of that time, also for those in which the service was busy.
# Beyond it, accept one per pause.
_MOST_ALIVE, _PACE_SECONDS = 10, 0.05


class ClientSilent(Exception):
    """The client has sent nothing for too long, although it said that it would."""


class LiveStream(Generic[Request]):
    """A stream of a client: iterates over its requests, and sends it the responses. For the event loop.

    While there is no response, it sends `Alive`. It ends the stream of a client that sent `Alive` earlier and is
    now silent. A ping would not show that: a proxy answers it, even if the client behind the proxy is gone.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], requests: AsyncIterator[Request], alive: Any
    ) -> None:
        """`alive` is the message to send, with the time in which each side expects one of the other."""
        self._context, self._requests, self._alive = context, requests, alive
        self._writing = asyncio.Lock()
        self._waiting = self._promised = False
        self._received = self._alives = self._sent = 0

    def __aiter__(self) -> Self:
        return self

    # Not a generator, which would keep each message in memory until the next one.
    async def __anext__(self) -> Request:
        """The client's next message other than `Alive`."""
        self._waiting = True
        while is_alive(request := await anext(self._requests)):
            self._received, self._promised, self._alives = self._received + 1, True, self._alives + 1
            if self._alives > _MOST_ALIVE:
                await asyncio.sleep(_PACE_SECONDS)  # Meanwhile gRPC slows the client down.
        self._waiting = False
        if not self._received:
            await self._write(self._alive)  # Not earlier: the first message shows whether the client has the role.
        self._received += 1
        return request

    async def answer(self, responses: AsyncGenerator[Any, None]) -> None:
        """Send the responses, and close `responses` if the client leaves, cancels or is silent.

        If gRPC got the generator, it would log a traceback for each client that leaves.
        """
        watch = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            async with aclosing(responses):
                async for response in responses:
                    await self._write(response)
        finally:
            watch.cancel()

    async def _watch(self, stream: "asyncio.Task[Any] | None") -> None:
        """Send `Alive`, and end the stream of a silent client."""
        sent = received = missed = 0
        seconds = self._alive.alive.within_seconds
        while stream and missed <= MESSAGES_IN_TIME:
            await asyncio.sleep(seconds / MESSAGES_IN_TIME)
            if self._received and self._sent == sent and not self._writing.locked():
                await self._write(self._alive)
            sent = self._sent
            # Count intervals, because after a pause of this whole process a clock would count the pause too.
            silent = self._promised and self._waiting and self._received == received
            received, missed = self._received, missed + 1 if silent else 0
            self._alives -= _MOST_ALIVE
        if stream:
            current_call().error = ClientSilent(f"nothing has come from it for {seconds:.15g} s")
            stream.cancel()  # It may be blocked inside gRPC.

    async def _write(self, response: Any) -> None:
        async with self._writing:  # gRPC writes one message of a stream at a time.
            try:
                await self._context.write(response)
            except grpc.aio.InternalError as error:  # The stream is closed.
                raise asyncio.CancelledError from error
            self._sent += 1
