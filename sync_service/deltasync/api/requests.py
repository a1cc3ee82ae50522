"""Inputs of HTTP requests: path, query and body; and long-running requests."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import unquote

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from deltasync.access.rights import need_of_request
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.words import listed


def take_inputs(routes: Iterable[BaseRoute]) -> None:
    """Decode the names in the path of each route, and refuse unknown query parameters.

    Public routes accept any, as monitors and links often add some.
    """
    for route in routes:
        if isinstance(route, Route):
            route.app = _Inputs(route)


class _Inputs:
    """Wraps the application of a route."""

    def __init__(self, route: Route) -> None:
        self._app, self._path = route.app, route.path_format
        needs = [need_of_request(method, route.path_format) for method in route.methods or ()]
        self._takes_any = all(need.role is None for need in needs)
        fields = route.dependant.query_params if isinstance(route, APIRoute) else ()
        self._parameters = {each.alias for each in fields}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            InvalidInput: the route does not have a query parameter.
        """
        unknown = sorted(QueryParams(scope["query_string"]).keys() - self._parameters)
        if unknown and not self._takes_any:
            takes = f"{scope['method']} {self._path} takes {listed(self._parameters) or 'none'}"
            raise InvalidInput(f"unknown query parameter {unknown[0]!r}: {takes}")
        names = {name: unquote(value) for name, value in scope["path_params"].items()}
        await self._app({**scope, "path_params": names}, receive, send)


MOST_BYTES = 64 << 10
# Characters to show in an error on each side of a bad one.
_SHOWN = 40


async def json_object(
    request: Request, keys: tuple[str, ...], most_bytes: int = MOST_BYTES, *, optional: bool = False
) -> dict[str, Any]:
    """Read a request's body as a JSON object, whatever its content type.

    Args:
        request: the request.
        keys: the allowed keys.
        most_bytes: largest body to accept.
        optional: treat an empty body as an empty object.

    Raises:
        InvalidInput: the body is not an object, has other keys, or is too large.
    """
    body = await _body(request, most_bytes)
    if optional and not body:
        return {}
    described = _parsed(body)
    if not isinstance(described, dict):
        raise InvalidInput("body: expected an object")
    if unknown := sorted(described.keys() - set(keys)):
        raise InvalidInput(f"body: unknown key {unknown[0]!r}; keys: {', '.join(keys)}")
    return described


def text_of(described: dict[str, Any], key: str, default: str | None = None) -> str:
    """The string at a key of a body, or the default.

    Raises:
        InvalidInput: the key is missing without a default, or its value is not a string.
    """
    text = described.get(key, default)
    if not isinstance(text, str):
        raise InvalidInput(f"body: expected {key} as a string")
    return text


def text_body(key: str, words: str, example: str, *, required: bool, **flags: str) -> dict[str, Any]:
    """The OpenAPI description of a body with one string and flags, for `openapi_extra`."""
    booleans = {name: {"type": "boolean", "description": each} for name, each in flags.items()}
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": words}, **booleans},
        "required": [key] if required else [],
        "additionalProperties": False,
    }
    content = {"application/json": {"schema": schema, "example": {key: example}}}
    return {"requestBody": {"required": required, "content": content}}


async def _body(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                raise InvalidInput(f"body: expected at most {most_bytes} bytes")
    except ClientDisconnect as error:
        raise InvalidInput("body: it is incomplete") from error
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        parsed = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can escape a lone surrogate, which cannot be stored.
        around = error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]
        raise InvalidInput(f"body: {around!r} contains a lone surrogate, half of a character") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"body: expected JSON in UTF-8: {error}") from error
    return parsed


T = TypeVar("T")


async def while_wanted(request: Request, draining: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a request after reading its body. Cancel it if the client hangs up or `draining` is set.

    Raises:
        ServiceUnavailable: the work was cancelled.
    """
    working = asyncio.create_task(work)
    gone, ending = asyncio.create_task(_gone(request)), asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({working, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        left = gone.done()
    finally:
        for each in (working, gone, ending):
            each.cancel()
        await asyncio.gather(working, return_exceptions=True)
    raise ServiceUnavailable("the client hung up" if left else "the service is shutting down; ask again")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
