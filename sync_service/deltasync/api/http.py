"""The HTTP side, for operators and their tools."""

import asyncio

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.access.access import Access
from deltasync.api.access import AccessMiddleware
from deltasync.api.consumer_routes import consumer_routes
from deltasync.api.errors import answer_errors
from deltasync.api.model_routes import delete_routes, model_routes, table_routes, trainer_routes
from deltasync.api.operation_routes import checkpoint_routes, operation_routes, process_routes
from deltasync.api.origins import OriginsMiddleware
from deltasync.api.overview_routes import event_routes, lag_routes, log_routes, overview_routes
from deltasync.api.page import documentation_routes, page_routes
from deltasync.api.requests import EncodedPathMiddleware, take_inputs
from deltasync.base.build import built_version
from deltasync.service.service import Service
from deltasync.status.answers import Answers, Sampler


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


_DESCRIPTION = """
How far every consumer is behind, why, and what to do about it.

Answers are JSON, with the names that `deltasync ... --json` has. Times are seconds unless the name says otherwise.
Every error is `{"error": NAME, "message": WORDS}`. Of several processes each answers for its own models: a request
about the model of another one is answered 307 with its address, lists are of the process that is asked, and
`/processes` names all. With roles, `GET` needs `read`, and what changes something
`admin`; `/livez` and `/readyz` need nothing.
"""


def create_app(service: Service, access: Access, sampler: Sampler | None = None) -> FastAPI:
    """The application; it shares the service's event loop. `sampler` looks for those who watch, once it runs."""
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
    app.add_middleware(OriginsMiddleware, service=service)
    answer_errors(app)
    sampler = sampler or Sampler(service, Answers(service))
    answers = sampler.answers
    routers = (
        overview_routes(service, access, answers, sampler),
        consumer_routes(service),
        lag_routes(service, answers, sampler.histories),
        table_routes(service, answers),
        model_routes(service),
        trainer_routes(service),
        event_routes(service),
        delete_routes(service),
        process_routes(service),
        checkpoint_routes(service),
        log_routes(service),
        operation_routes(service),
    )
    # Included, each route would be made twice.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes += page_routes(service)
    app.router.routes += documentation_routes(app)
    take_inputs(app.router.routes)
    return app
