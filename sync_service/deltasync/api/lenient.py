"""Accept the reads that tools and load balancers send: HEAD on every GET route, and a trailing slash."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
