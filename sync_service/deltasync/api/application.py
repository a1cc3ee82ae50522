"""The HTTP application for operators: its routes, page and middlewares."""

import asyncio
import re
from importlib.resources import files
from urllib.parse import quote, unquote_to_bytes, urlsplit

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.access.rights import Access
from deltasync.api.consumer_routes import consumer_routes
from deltasync.api.documentation import documentation_routes
from deltasync.api.errors import answer_errors, error_response
from deltasync.api.interceptor import AccessMiddleware
from deltasync.api.model_routes import delete_routes, model_routes, table_routes, trainer_routes
from deltasync.api.operation_routes import Collaborators, checkpoint_routes, operation_routes, process_routes
from deltasync.api.overview_routes import event_routes, lag_routes, log_routes, overview_routes
from deltasync.api.requests import take_inputs
from deltasync.api.version_routes import version_routes
from deltasync.base.errors import NotFound, NotPermitted
from deltasync.base.process import built_version
from deltasync.cluster.owners import Owners
from deltasync.service.models import Models
from deltasync.status.answers import Sampler

_DESCRIPTION = """
Shows how far every consumer is behind and why, and lets operators act on it.

Answers are JSON with the same names as `deltasync ... --json`. Times are in seconds unless the name has another
unit. Every error is `{"error": NAME, "message": WORDS}`.

With several processes, each answers for its own models. It redirects a request for another process's model with
status 307, and its lists contain only its own models. `/processes` lists all processes.

With roles, `GET` needs `read` and every change needs `admin`. `/livez`, `/readyz`, the page and this documentation
are open to anyone.
"""


def create_app(on: Collaborators, access: Access, sampler: Sampler) -> FastAPI:
    """Create the application, for the service's event loop. `sampler` serves its status streams."""
    models, removals = on.models, on.removals
    app = FastAPI(
        title="deltasync",
        version=built_version() or "unknown",
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,  # FastAPI's page loads scripts from other hosts.
        redoc_url=None,
        redirect_slashes=False,  # A redirect would send the token to whatever host the client named.
    )
    app.add_middleware(AccessMiddleware, access=access)
    app.add_middleware(LenientMiddleware)
    app.add_middleware(EncodedPathMiddleware)
    # Added last to see requests first, as browsers send their preflight without a token.
    app.add_middleware(OriginsMiddleware, models=models)
    answer_errors(app)
    routers = (
        overview_routes(sampler, access),
        consumer_routes(on),
        lag_routes(sampler),
        table_routes(models, sampler.answers),
        model_routes(models, removals),
        trainer_routes(models),
        event_routes(on.recent_events, on.draining),
        delete_routes(models, removals),
        process_routes(models),
        checkpoint_routes(models, on.checkpoints),
        log_routes(on.events),
        operation_routes(on),
        version_routes(on),
    )
    # `include_router` would make each route twice.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes += page_routes(models)
    app.router.routes += documentation_routes(app)
    take_inputs(app.router.routes)
    return app


_PORTS = {"http": 80, "https": 443}


_READS = ("GET", "HEAD", "OPTIONS")


_HOST = re.compile(r"[\w.:-]+", re.ASCII)


_MAY = {
    "Access-Control-Allow-Methods": "GET",
    "Access-Control-Allow-Headers": "Authorization",
    "Access-Control-Max-Age": "600",
}


class OriginsMiddleware:
    """Limits the requests of pages from other origins (CORS, enforced by browsers).

    The page of one process may read from all other processes of the service. A browser shows an answer to a page
    of another origin only if the answer names that origin. The service names only the origins of its own
    processes, at their advertised addresses. Their pages may use only GET, without cookies and certificates, and
    with no header but the token.

    For any page, a browser also sends requests that change something, with the operator's certificate, even if the
    page cannot read the answer. The service refuses them unless the page is its own.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not (origin := headers.get("origin")):
            await self._app(scope, receive, send)
            return
        if scope["method"] not in _READS and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            error = NotPermitted("a page of another origin may not change anything")
            await error_response(error)(scope, receive, send)
            return
        allowed = {"Access-Control-Allow-Origin": origin} if origin in origins(self._models.owners) else {}
        asked = headers.get("access-control-request-method") if scope["method"] == "OPTIONS" else None
        if allowed and asked == "GET":
            await Response(status_code=204, headers=allowed | _MAY | {"Vary": "Origin"})(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if scope["method"] == "GET":
                    answer.update(allowed)
            await send(message)

        await self._app(scope, receive, send_named)


def origins(owners: Owners) -> set[str]:
    """The origins of the service's running processes, as browsers write them. For the event loop."""
    return {origin for each in owners.processes() if (origin := origin_of(each.http))}


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


# Characters that stay unencoded in a part of a path: RFC 3986, "pchar".
_PLAIN = "-._~!$&'()*+,;=:@"


class EncodedPathMiddleware:
    """Matches routes against the encoded path.

    A decoded name can contain a slash or a line break, which would confuse the match.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            parts = scope["raw_path"].split(b"/")
            scope = {**scope, "path": "/".join(quote(unquote_to_bytes(each), safe=_PLAIN) for each in parts)}
        await self._app(scope, receive, send)


class LenientMiddleware:
    """Serves HEAD as GET without the body, and ignores a trailing slash in both.

    A redirect instead would make the client send its token to whatever host it named. Requests that change
    something keep their slash, as a missing name after it is an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/") or "/"
        scope = {**scope, "path": path, "raw_path": scope["raw_path"].rstrip(b"/") or b"/"}
        if scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()

        async def receive_until_answered() -> Message:
            """Pass the request on. After the answer, report a disconnect to end an event stream."""
            incoming, over = asyncio.ensure_future(receive()), asyncio.ensure_future(answered.wait())
            try:
                await asyncio.wait({incoming, over}, return_when=asyncio.FIRST_COMPLETED)
                return incoming.result() if incoming.done() else {"type": "http.disconnect"}
            finally:
                incoming.cancel()
                over.cancel()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)


_FOLDER = files("deltasync.api") / "page"


_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


_FILES = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _KINDS}


_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes(models: Models) -> list[Route]:
    """Routes for the page and its files."""

    def answer(name: str) -> Response:
        headers = _HEADERS | {"Content-Security-Policy": _policy(models.owners)}
        return Response(_FILES[name], media_type=_KINDS[name.rpartition(".")[2]], headers=headers)

    async def index(_request: Request) -> Response:
        return answer("index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            raise NotFound(f"the page has no file {name!r}")
        return answer(name)

    return [Route("/", index), Route("/page/{name}", file)]


def _policy(owners: Owners) -> str:
    """Allow the page only its own code and requests to the service's processes, and no frames around it."""
    asked = " ".join(["'self'", *sorted(origins(owners))])
    rest = "img-src data:; base-uri 'none'; frame-ancestors 'none'"
    return f"default-src 'self'; connect-src {asked}; {rest}"
