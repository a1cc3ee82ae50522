"""Requests that last: their work ends with them, whoever ends them, and their peer is silent only in its turn."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi import Request
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from deltasync.access.audit import Audit
from deltasync.access.rights import Access
from deltasync.access.roles import Grant, Role, Roles, TokenRoles, token_digest
from deltasync.api.http_server import HttpProtocol
from deltasync.api.interceptor import AccessMiddleware
from deltasync.api.requests import while_wanted
from deltasync.base.errors import Contradiction, ServiceUnavailable
from deltasync.base.events import Events


class Client:
    """Sends a request, and hangs up when it is told to."""

    def __init__(self) -> None:
        self._messages = asyncio.Queue[dict[str, Any]]()
        self._messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.request = Request({"type": "http"}, self._messages.get)

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


class Work:
    """Takes for ever, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize(("end", "said"), [("client", "hung up"), ("service", "is shutting down; ask again")])
def test_work_is_cancelled_with_its_client_and_with_the_service(end: str, said: str) -> None:
    async def main() -> None:
        client, draining, work = Client(), asyncio.Event(), Work()
        asked = asyncio.create_task(while_wanted(client.request, draining, work.run()))
        await work.begun.wait()
        client.hang_up() if end == "client" else draining.set()
        with pytest.raises(ServiceUnavailable, match=said):
            await asked
        assert work.cancelled

    asyncio.run(main())


def test_work_is_cancelled_with_the_task_that_answers() -> None:
    async def main() -> None:
        work = Work()
        asked = asyncio.create_task(while_wanted(Client().request, asyncio.Event(), work.run()))
        await work.begun.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert work.cancelled

    asyncio.run(main())


def test_the_result_and_the_error_of_work_are_those_of_the_request() -> None:
    async def done() -> int:
        return 7

    async def failing() -> int:
        raise Contradiction("no")

    async def main() -> None:
        assert await while_wanted(Client().request, asyncio.Event(), done()) == 7
        with pytest.raises(Contradiction):
            await while_wanted(Client().request, asyncio.Event(), failing())

    asyncio.run(main())


ROLES = Roles((TokenRoles("ana", token_digest("ana's"), (Grant(Role.ADMIN),)),))
SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": "/fsck",
    "raw_path": b"/fsck",
    "headers": [(b"authorization", b"Bearer ana's")],
    "client": ("127.0.0.1", 4711),
}


@pytest.mark.parametrize("answering", [False, True])
def test_a_revoked_role_ends_a_request_unless_its_answer_has_begun(answering: bool) -> None:
    sent, asked = list[dict[str, Any]](), asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if answering:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        await asyncio.Event().wait()

    async def keep(message: Any) -> None:
        sent.append(message)

    async def nothing() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        access = Access(None, ROLES, Audit(Events()))
        request = asyncio.create_task(AccessMiddleware(app, access)(SCOPE, nothing, keep))
        await asked.wait()
        access.take(Roles())
        if answering:
            with pytest.raises(asyncio.CancelledError):
                await request
        else:
            await request

    asyncio.run(main())
    assert [each["status"] for each in sent if "status" in each] == [200 if answering else 403]


REQUEST = b"GET / HTTP/1.1\r\nhost: s\r\n\r\n"


def test_a_peer_counts_as_silent_only_while_it_has_its_turn() -> None:
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
