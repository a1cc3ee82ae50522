"""The page for people, and the files that it is made of: nothing is fetched from elsewhere.

The page itself shows nothing of the service, and needs no role: what it asks for does, with a token of who looks.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltasync.api.origins import origins
from deltasync.core.errors import NotFound
from deltasync.service.service import Service

_FOLDER = files("deltasync.api") / "page"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _KINDS}
_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes(service: Service) -> list[Route]:
    """The routes."""

    def answer(name: str) -> Response:
        headers = _HEADERS | {"Content-Security-Policy": _policy(service)}
        return Response(_FILES[name], media_type=_KINDS[name.rpartition(".")[2]], headers=headers)

    async def index(_request: Request) -> Response:
        return answer("index.html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            raise NotFound(f"the page has no file {name!r}")
        return answer(name)

    return [Route("/", index), Route("/page/{name}", file)]


def _policy(service: Service) -> str:
    """The page runs no code but its own, asks only the service's processes, and nobody shows it in a frame."""
    asked = " ".join(["'self'", *sorted(origins(service))])
    rest = "img-src data:; base-uri 'none'; frame-ancestors 'none'"
    return f"default-src 'self'; connect-src {asked}; {rest}"
