"""The page for people, and the files that it is made of: nothing is fetched from elsewhere.

The page itself shows nothing of the service, and needs no role: what it asks for does, with a token of who looks.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltasync.core.errors import NotFound

_FOLDER = files("deltasync.api") / "page"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _KINDS}
# Whatever somebody brings into it, the page runs no other code, and nobody else shows it in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The routes."""
    return [Route("/", _index), Route("/page/{name}", _file)]


async def _index(_request: Request) -> Response:
    return _answer("index.html")


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise NotFound(f"the page has no file {name!r}")
    return _answer(name)


def _answer(name: str) -> Response:
    return Response(_FILES[name], media_type=_KINDS[name.rpartition(".")[2]], headers=_HEADERS)
