"""Letting HTTP requests in, or not: before their body is received."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.api.access import Access, Credentials, OpenCall, check
from deltasync.api.access_table import need_of_request
from deltasync.api.call_errors import error_response
from deltasync.api.http_protocol import CERTIFICATE_NAMES
from deltasync.core.errors import DeltasyncError


class AccessMiddleware:
    """Lets a request in only if its caller has the role that the route needs, and ends it when that is revoked."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        with self._access.call(f"{method} {path}", need_of_request(method, path), _credentials(scope)) as opened:
            try:
                check(opened)
            except DeltasyncError as error:
                await error_response(error)(scope, receive, send)
                return
            await self._answer(opened, scope, receive, send)

    async def _answer(self, opened: OpenCall, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            if opened.revoked is None or begun:
                raise
            if task := asyncio.current_task():
                task.uncancel()
            await error_response(opened.revoked)(scope, receive, send)


def _credentials(scope: Scope) -> Credentials:
    client = scope.get("client")
    names = scope.get("state", {}).get(CERTIFICATE_NAMES, ())
    return Credentials.of(
        Headers(scope=scope), names, f"{client[0]}:{client[1]}" if client else "an unknown address"
    )
