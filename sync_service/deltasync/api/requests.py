"""What a request says in its path, its query and its body, and requests that take long."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import quote, unquote, unquote_to_bytes

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltasync.access.access import need_of_request
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.words import listed
from deltasync.service.service import Service

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


def take_inputs(routes: Iterable[BaseRoute]) -> None:
    """Decode the names in the path of each route, and refuse query parameters that the route does not have.

    What anyone may ask for takes any: monitors add some to a probe, links to a page.
    """
    for route in routes:
        if isinstance(route, Route):
            route.app = _Inputs(route)


class _Inputs:
    """The application of a route, behind its inputs."""

    def __init__(self, route: Route) -> None:
        self._app, self._path = route.app, route.path_format
        needs = [need_of_request(method, route.path_format) for method in route.methods or ()]
        self._takes_any = all(need.role is None for need in needs)
        fields = route.dependant.query_params if isinstance(route, APIRoute) else ()
        self._known = {each.alias for each in fields}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            InvalidInput: it has a query parameter that the route does not have.
        """
        unknown = sorted(QueryParams(scope["query_string"]).keys() - self._known)
        if unknown and not self._takes_any:
            takes = f"{scope['method']} {self._path} takes {listed(self._known) or 'none'}"
            raise InvalidInput(f"unknown query parameter {unknown[0]!r}: {takes}")
        names = {name: unquote(value) for name, value in scope["path_params"].items()}
        await self._app({**scope, "path_params": names}, receive, send)


MOST_BYTES = 64 << 10
# Characters on each side of one that is not right.
_SHOWN = 40


async def json_object(
    request: Request, keys: tuple[str, ...], most_bytes: int = MOST_BYTES, *, optional: bool = False
) -> dict[str, Any]:
    """The object that a request's body is, whatever content type it names.

    Args:
        request: the request.
        keys: the keys that the object may have.
        most_bytes: the largest body to take.
        optional: take an empty body for an empty object.

    Raises:
        InvalidInput: it is none, has other keys, or is larger than `most_bytes`; the message says what is wrong.
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
    """The text that a body has under a key, or the default.

    Raises:
        InvalidInput: it has none and there is no default, or it has something else.
    """
    text = described.get(key, default)
    if not isinstance(text, str):
        raise InvalidInput(f"body: expected {key}, as a text")
    return text


async def _body(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                raise InvalidInput(f"body: more than {most_bytes} bytes")
    except ClientDisconnect as error:
        raise InvalidInput("body: it ends in the middle") from error
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        found = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can name half of a character, which nothing could store or send.
        around = error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]
        raise InvalidInput(f"body: {around!r} has half of a character, a lone surrogate") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"body: no JSON in UTF-8: {error}") from error
    return found


T = TypeVar("T")


async def while_wanted(request: Request, service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a request whose body was read. Cancel it if the client hangs up or the service shuts down.

    Raises:
        ServiceUnavailable: one of both has happened.
    """
    working = asyncio.create_task(work)
    gone, draining = asyncio.create_task(_gone(request)), asyncio.create_task(service.draining.wait())
    try:
        await asyncio.wait({working, gone, draining}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        left = gone.done()
    finally:
        for each in (working, gone, draining):
            each.cancel()
        await asyncio.gather(working, return_exceptions=True)
    raise ServiceUnavailable("the client has hung up" if left else "the service is shutting down; ask again")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
