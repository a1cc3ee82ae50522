"""A bare gRPC stream that carries bytes to another process and back."""

import asyncio
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc.aio

_SERVICE, _METHOD = "bench.Echo", "Echo"


async def serve_echo() -> None:
    """Send back what comes, until the end of the standard input."""
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    sys.stdout.write(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def _echo(messages: AsyncIterator[bytes], _: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


class Echo:
    """The other end of the stream."""

    def __init__(self, address: str) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        call: Any = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        self._answers = call(iter(self._messages.get, None))

    def there_and_back(self, message: bytes) -> None:
        """Send a message and wait until it has come back."""
        self._messages.put(message)
        next(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.put(None)
        self._channel.close()
