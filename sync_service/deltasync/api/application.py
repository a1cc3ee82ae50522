"""The HTTP side, for operators and their tools: the application, its page and its middlewares."""

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
from deltasync.base.errors import NotFound, NotPermitted
from deltasync.base.process import built_version
from deltasync.cluster.owners import Owners
from deltasync.service.models import Models
from deltasync.service.service import Service
from deltasync.status.answers import Sampler
from deltasync.status.sources import ProcessState, Sources

_DESCRIPTION = """
How far every consumer is behind, why, and what to do about it.

Answers are JSON, with the names that `deltasync ... --json` has. Times are seconds unless the name says otherwise.
Every error is `{"error": NAME, "message": WORDS}`. Of several processes each answers for its own models: a request
about the model of another one is answered 307 with its address, lists are of the process that is asked, and
`/processes` names all. With roles, `GET` needs `read`, and what changes something
`admin`; `/livez` and `/readyz` need nothing.
"""


def create_app(service: Service, access: Access, sampler: Sampler) -> FastAPI:
    """The application; it shares the service's event loop. `sampler` looks for those who watch, while it runs."""
    models, removals = service.models, service.removals
    app = FastAPI(
        title="deltasync",
        version=built_version() or "unknown",
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,  # It would be fetched from elsewhere.
        redoc_url=None,
        redirect_slashes=False,  # Which would send who asks, and their token, to the host that they have named.
    )
    app.add_middleware(AccessMiddleware, access=access)
    app.add_middleware(LenientMiddleware)
    app.add_middleware(EncodedPathMiddleware)
    # Last, so it sees a request first: browsers ask without a token whether they may send one.
    app.add_middleware(OriginsMiddleware, models=models)
    answer_errors(app)
    routers = (
        overview_routes(sampler, access),
        consumer_routes(models, service.registry, service.consumers, service.brake, removals),
        lag_routes(sampler),
        table_routes(models, sampler.answers),
        model_routes(models, removals),
        trainer_routes(models),
        event_routes(service.recent_events, service.draining),
        delete_routes(models, removals),
        process_routes(models),
        checkpoint_routes(models, service.checkpoints),
        log_routes(service.events),
        operation_routes(
            Collaborators(
                models=models,
                registry=service.registry,
                views=service.views,
                checkpoints=service.checkpoints,
                data_dir=service.options.data_dir,
                events=service.events,
                draining=service.draining,
            )
        ),
    )
    # Included, each route would be made twice.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes += page_routes(models)
    app.router.routes += documentation_routes(app)
    take_inputs(app.router.routes)
    return app


def sources_of(service: Service, process: ProcessState) -> Sources:
    """What status reads of a service."""
    return Sources(
        models=service.models,
        registry=service.registry,
        consumers=service.consumers,
        checkpoints=service.checkpoints,
        volumes=service.volumes,
        limits=service.limits,
        event_counts=service.event_counts,
        recent_events=service.recent_events,
        process=process,
    )


_PORTS = {"http": 80, "https": 443}


_READS = ("GET", "HEAD", "OPTIONS")


_HOST = re.compile(r"[\w.:-]+", re.ASCII)


_MAY = {
    "Access-Control-Allow-Methods": "GET",
    "Access-Control-Allow-Headers": "Authorization",
    "Access-Control-Max-Age": "600",
}


class OriginsMiddleware:
    """Decides what pages of other origins may ask for, as browsers enforce it (CORS).

    The page of one process may ask all other processes of the service. A browser shows an answer to a page of
    another origin only if the answer names that origin. We name the origins of the service's own processes, at the
    addresses that they advertise, and no others. Their pages may only read: no method but GET, no header but the
    token, no cookies and no certificates.

    A browser also sends requests that change something, with the operator's certificate, for a page that may not
    read the answer. The service refuses them unless the page is its own.
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
            error = NotPermitted("a page of another origin may change nothing here")
            await error_response(error)(scope, receive, send)
            return
        known = {"Access-Control-Allow-Origin": origin} if origin in origins(self._models.owners) else {}
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


def origins(owners: Owners) -> set[str]:
    """The origins of the service's processes that are alive, as browsers write them. In the event loop."""
    return {found for each in owners.processes() if (found := origin_of(each.http))}


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


# What a part of a path has unencoded: RFC 3986, "pchar".
_PLAIN = "-._~!$&'()*+,;=:@"


class EncodedPathMiddleware:
    """Matches routes against the path as it is encoded.

    A decoded name may contain a slash or a line break, which a route would take for its own or not match at all.
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

    A redirect would make the client send its token to whatever host it named. Requests that change something keep
    their slash: a missing name after it is an error.
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
            """Pass the request on. After the answer, report a disconnect, which ends an event stream."""
            coming, over = asyncio.ensure_future(receive()), asyncio.ensure_future(answered.wait())
            try:
                await asyncio.wait({coming, over}, return_when=asyncio.FIRST_COMPLETED)
                return coming.result() if coming.done() else {"type": "http.disconnect"}
            finally:
                coming.cancel()
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
    """The routes."""

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
    """The page runs no code but its own, asks only the service's processes, and nobody shows it in a frame."""
    asked = " ".join(["'self'", *sorted(origins(owners))])
    rest = "img-src data:; base-uri 'none'; frame-ancestors 'none'"
    return f"default-src 'self'; connect-src {asked}; {rest}"
