"""Letting HTTP requests in, or not: before their body is received."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deltasync.api.access import Access, Credentials, check
from deltasync.api.access_table import need_of_request
from deltasync.api.call_errors import error_response
from deltasync.api.http_protocol import CERTIFICATE_NAMES
from deltasync.core.errors import DeltasyncError


class AccessMiddleware:
    """Lets a request in only if whoever makes it has the role that its route needs."""

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
            await self._app(scope, receive, send)


def _credentials(scope: Scope) -> Credentials:
    client = scope.get("client")
    names = scope.get("state", {}).get(CERTIFICATE_NAMES, ())
    return Credentials.of(
        Headers(scope=scope), names, f"{client[0]}:{client[1]}" if client else "an unknown address"
    )
