"""The OpenAPI document of the HTTP API. The page sync_service/docs/reference/http.md is generated from it."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.routing import Route

from deltasync.api.errors import OF_ROUTES
from deltasync.wire.errors import http_errors


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
