"""The HTTP application for operators: its routes, page and middlewares."""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltasync.access.rights import Access
from deltasync.api.consumer_routes import consumer_routes
from deltasync.api.errors import OF_ROUTES, answer_errors, error_response
from deltasync.api.interceptor import AccessMiddleware
from deltasync.api.model_routes import model_routes, version_routes
from deltasync.api.operation_routes import Collaborators, operation_routes
from deltasync.api.overview_routes import event_routes, log_routes, overview_routes
from deltasync.api.requests import BodyMiddleware
from deltasync.base.errors import NotFound, NotPermitted
from deltasync.base.process import built_version
from deltasync.cluster.owners import Owners
from deltasync.service.models import Models
from deltasync.status import records
from deltasync.status.answers import Sampler
from deltasync.status.records import ConsumerStatus, ModelStatus, ReplicaStatus, TableLag, TableStatus, columns
from deltasync.wire.errors import http_errors

_DESCRIPTION = """
Shows how far every consumer is behind and why, and lets operators act on it.

Bodies are JSON, and so are answers, with the same names as `deltasync ... --json`. Times are in seconds unless the
name has another unit. Every error is `{"error": NAME, "message": WORDS}`.

With several processes, each answers for its own models. It redirects a request for another process's model with
status 307, and its lists contain only its own models. `/processes` lists all processes.

With roles, `GET` needs `read` and every change needs `admin`. `/livez`, `/readyz`, the page and this document are
open to anyone.
"""


# Pydantic would build a record's schema again for each route that answers with it: most of the service's start.
for _record in vars(records).values():
    if isinstance(_record, type) and is_dataclass(_record) and _record.__module__ == records.__name__:
        _record.__pydantic_core_schema__ = TypeAdapter(_record).core_schema  # type: ignore[attr-defined]


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
    app.add_middleware(BodyMiddleware)
    # Added last to see requests first, as browsers send their preflight without a token.
    app.add_middleware(OriginsMiddleware, models=models)
    answer_errors(app)
    routers = (
        overview_routes(sampler, access),
        consumer_routes(on, sampler),
        model_routes(models, removals, sampler.answers),
        event_routes(on.recent_events, on.draining),
        log_routes(on.events),
        operation_routes(on),
        version_routes(on),
    )
    # `include_router` would make each route twice.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes += [*page_routes(models), documentation_route(app)]
    return app


_PORTS = {"http": 80, "https": 443}


_READS = ("GET", "HEAD", "OPTIONS")


_HOST = re.compile(r"[\w.:-]+", re.ASCII)


class OriginsMiddleware(CORSMiddleware):
    """Limits the requests of pages from other origins (CORS, enforced by browsers).

    The page of one process may read from all other processes of the service, at their advertised addresses, and
    with no header but the token.

    For any page, a browser also sends requests that change something, with the operator's certificate, even if the
    page cannot read the answer. The service refuses them unless the page is its own.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        super().__init__(app, allow_methods=["GET"], allow_headers=["Authorization"], max_age=600)
        self._models = models

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether a page of this origin may read."""
        return origin in origins(self._models.owners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not (origin := headers.get("origin")):
            await self.app(scope, receive, send)
        elif scope["method"] in _READS:
            await super().__call__(scope, receive, send)
        elif urlsplit(origin).netloc.lower() == headers.get("host", "").lower():
            await self.app(scope, receive, send)
        else:
            error = NotPermitted("a page of another origin may not change anything")
            await error_response(error)(scope, receive, send)


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


_FOLDER = files("deltasync.api") / "page"


_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


_FILES = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _KINDS}


# The columns of each record's table.
_COLUMNS = {
    record.__name__: [
        {"names": each.names, "title": each.shown.title, "unit": each.shown.unit, "number": each.number}
        for each in columns(record)
    ]
    for record in (ModelStatus, ConsumerStatus, ReplicaStatus, TableStatus, TableLag)
}
_FILES["columns.js"] = f"export const COLUMNS = {json.dumps(_COLUMNS)};\n".encode()


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


def documentation_route(app: FastAPI) -> Route:
    """The route of an application's OpenAPI document.

    It is built on request, in a thread, as this takes as long as the rest of the service's start.
    """
    document = app.openapi = _documented(app)  # type: ignore[method-assign]

    async def openapi(_request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(document))

    return Route("/openapi.json", openapi, include_in_schema=False)


def _documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    build, lock = app.openapi, threading.Lock()
    built = cache(lambda: document_errors(build()))

    def document() -> dict[str, Any]:
        with lock:
            return built()

    return document


@dataclass(frozen=True)
class ErrorBody:
    """An error: its name, and a message with the problem and the remedy."""

    error: str
    message: str


def document_errors(document: dict[str, Any]) -> dict[str, Any]:
    """Replace FastAPI's errors in an OpenAPI document by ours, which are always JSON.

    They are added here because FastAPI would spend most of the service's start on models for them.
    """
    schemas, errors = document["components"]["schemas"], _errors()
    schemas["ErrorBody"] = TypeAdapter(ErrorBody).json_schema()
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.pop("422", None)
            own = {status: _as_json(each) if status >= "400" else each for status, each in responses.items()}
            operation["responses"] = dict(sorted((errors | own).items()))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _errors() -> dict[str, Any]:
    """The errors of every route, by status."""
    named = {405: [OF_ROUTES[405]]} | http_errors()
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {str(status): {"description": " or ".join(names), "content": body} for status, names in named.items()}


def _as_json(response: dict[str, Any]) -> dict[str, Any]:
    content = response.get("content")
    return response | {"content": {"application/json": next(iter(content.values()))}} if content else response
