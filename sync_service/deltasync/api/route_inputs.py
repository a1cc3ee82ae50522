"""What a request says in its path and its query, taken alike by all routes."""

from collections.abc import Iterable
from urllib.parse import quote, unquote, unquote_to_bytes

from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltasync.api.access_table import need_of_request
from deltasync.core.errors import InvalidInput
from deltasync.core.words import listed

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
