"""Requests as tools and load balancers make them: HEAD wherever GET is, and a slash behind the path."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LenientMiddleware:
    """Answers HEAD as GET without a body, and a GET of a path that ends with a slash as of the one without.

    A redirect would do for the slash, but who asks would then send its token to the host that it has named. What
    changes something is taken literally: a name that is missing behind the slash is an error.
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
            """What comes of the request. Once it is answered, the peer seems gone, which ends a stream."""
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
