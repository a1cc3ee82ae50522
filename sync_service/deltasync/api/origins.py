"""What pages of other origins may ask for, as browsers enforce it (CORS).

The page of one process may ask all others of the service.

A browser shows an answer to a page of another origin only if the answer names that origin. We name the origins of
the service's own processes, at the addresses that they advertise, and no others. Their pages may only read: no
method but GET, no header but the token, no cookies and no certificates.

A browser also sends requests that change something, with the operator's certificate, for a page that may not read
the answer. The service refuses them unless the page is its own.
"""

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.api.errors import error_response
from deltasync.base.errors import NotPermitted
from deltasync.service.service import Service

_PORTS = {"http": 80, "https": 443}
_READS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"[\w.:-]+", re.ASCII)
_MAY = {
    "Access-Control-Allow-Methods": "GET",
    "Access-Control-Allow-Headers": "Authorization",
    "Access-Control-Max-Age": "600",
}


def origins(service: Service) -> set[str]:
    """The origins of the service's processes that are alive, as browsers write them. In the event loop."""
    return {found for each in service.owners.processes() if (found := origin_of(each.http))}


def origin_of(url: str) -> str:
    """The origin of an HTTP address, as browsers write it; empty if the address has none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host):
        return ""
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, _PORTS[parts.scheme]) else f":{port}")


class OriginsMiddleware:
    """Lets pages of the service's other processes read, and no page of another origin change anything."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not (origin := headers.get("origin")):
            await self._app(scope, receive, send)
            return
        if scope["method"] not in _READS and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            error = NotPermitted("a page of another origin may change nothing here")
            await error_response(error)(scope, receive, send)
            return
        known = {"Access-Control-Allow-Origin": origin} if origin in origins(self._service) else {}
        asked = headers.get("access-control-request-method") if scope["method"] == "OPTIONS" else None
        if known and asked == "GET":
            await Response(status_code=204, headers=known | _MAY | {"Vary": "Origin"})(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if scope["method"] == "GET":
                    answer.update(known)
            await send(message)

        await self._app(scope, receive, send_named)
