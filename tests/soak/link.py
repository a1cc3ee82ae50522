"""TCP proxies between the service and its peers: connections can be cut, silenced, delayed and slowed down."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

_CHUNK_BYTES = 1 << 16


class Link:
    """One proxy. Its attributes may be read in any thread; what changes it goes through `Links.on_loop`.

    Attributes:
        port: where it listens on loopback.
        connections: how many there have been.
        silent: nothing passes, and nobody is told: connections are half open.
        delay_seconds: how long each piece is held back.
        bytes_per_second: how much passes to the peer; None = all.
    """

    def __init__(self, service: str) -> None:
        """`service` is HOST:PORT."""
        host, _, port = service.rpartition(":")
        self._service = host, int(port)
        self.port = 0
        self.connections = 0
        self.silent = False
        self.delay_seconds = 0.0
        self.bytes_per_second: int | None = None
        self._writers = set[asyncio.StreamWriter]()
        self._tasks = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None
        self._speaks = asyncio.Event()

    async def listen(self) -> None:
        """Listen on a free port."""
        self._speaks.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Cut all connections, with whatever is under way."""
        for writer in self._writers:
            writer.transport.abort()

    async def silence(self, silent: bool) -> None:
        """Let nothing pass, or everything again that has not been given up meanwhile."""
        self.silent = silent
        if silent:
            self._speaks.clear()
        else:
            self._speaks.set()

    async def close(self) -> None:
        """Cut everything, and listen no more."""
        if self._server:
            self._server.close()
        await self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._connect(reader, writer))  # asyncio would log that its own is cancelled.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            self._writers.add(writer)
            await self._speaks.wait()
            from_service, to_service = await asyncio.open_connection(*self._service)
            ends.add(to_service)
            self._writers.add(to_service)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, to_service, slow=False))
                tasks.create_task(self._pass_on(from_service, writer, slow=True))
        except OSError:
            pass  # The service is away: so is whoever stands for it.
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES if not self.bytes_per_second else self.bytes_per_second):
                await self._speaks.wait()
                await asyncio.sleep(self.delay_seconds)
                writer.write(data)
                await writer.drain()
                if slow and self.bytes_per_second:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
        except OSError:
            pass  # Either side has gone: so does the other.
        finally:
            writer.transport.abort()


class Links:
    """Proxies, in a thread with a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self.named: dict[str, Link] = {}

    def open(self, name: str, service: str) -> str:
        """Listen for a peer's connections to the service, HOST:PORT; where, likewise."""
        link = self.named[name] = Link(service)
        self.on_loop(link.listen())
        return f"127.0.0.1:{link.port}"

    def on_loop(self, what: Coroutine[Any, Any, None]) -> None:
        """Have a proxy do something, and wait until it has."""
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.named.values():
            self.on_loop(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
