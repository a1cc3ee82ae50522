"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import StreamingResponse

MEDIA_TYPE = "text/event-stream"
# A comment comes so often, where nothing else does: who hears nothing for longer has lost the connection.
BEAT_SECONDS = 5.0
_BEAT = b": beat\n\n"


def wants_stream(request: Request) -> bool:
    """Whether whoever asks would have what comes, and not what there is."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One event, whose data are one line."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"


def event_stream(messages: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer that goes on as long as there are messages to come."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_beats(messages), media_type=MEDIA_TYPE, headers=headers)


async def _with_beats(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield _BEAT  # At once, so that who asks sees that it is heard.
    coming = asyncio.ensure_future(anext(messages, None))
    try:
        while True:
            await asyncio.wait([coming], timeout=BEAT_SECONDS)
            if not coming.done():
                yield _BEAT
                continue
            if (found := coming.result()) is None:
                return
            yield found
            coming = asyncio.ensure_future(anext(messages, None))
    finally:
        coming.cancel()
