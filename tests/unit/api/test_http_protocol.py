import asyncio
from typing import Any
from unittest.mock import Mock

import uvicorn
from uvicorn.server import ServerState

from deltasync.api.http_protocol import HttpProtocol

REQUEST = b"GET / HTTP/1.1\r\nhost: s\r\n\r\n"


def test_a_peer_is_silent_while_it_has_its_turn_and_not_while_the_service_works() -> None:
    asyncio.run(_silence())


async def _silence() -> None:
    answering = asyncio.Event()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await answering.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    state = ServerState()
    protocol = HttpProtocol(uvicorn.Config(app, lifespan="off", log_config=None), state, {})
    protocol.connection_made(Mock(get_extra_info=lambda _name, default=None: default, is_closing=lambda: False))
    assert [protocol.silent_seconds(now) for now in (3.0, 5.0)] == [0.0, 2.0]
    protocol.data_received(REQUEST[:7])
    assert protocol.silent_seconds(6.0) == 3.0
    for begin in (10.0, 100.0):  # Of a connection that is kept, each request has its own time.
        answering.clear()
        protocol.data_received(REQUEST[7:] if begin == 10.0 else REQUEST)
        assert [protocol.silent_seconds(begin + after) for after in (0.0, 50.0)] == [0.0, 0.0]
        answering.set()
        await asyncio.gather(*state.tasks)
        assert [protocol.silent_seconds(begin + after) for after in (51.0, 53.0)] == [0.0, 2.0]
