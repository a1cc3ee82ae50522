"""What has happened, over HTTP: as a list, or as it happens."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from deltasync.api.event_stream import MEDIA_TYPE, event_stream, message, wants_stream
from deltasync.core.recent_events import KEPT_EVENTS, RecentEvent
from deltasync.core.signals import first_of
from deltasync.service.service import Service

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"A list; or, to whoever accepts {MEDIA_TYPE}, a stream.", "content": {MEDIA_TYPE: {}}}
}
# Of the largest number that an event can have.
_DIGITS = 20
_Last = Annotated[int, Query(ge=0, le=KEPT_EVENTS, description="How many of those before are wanted, at most.")]


def event_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/events", response_model=list[RecentEvent], responses=_STREAM)
    async def events(request: Request, last: _Last = 100) -> Any:
        """The last events of this process: joins, refusals, repairs, takeovers.

        To whoever accepts text/event-stream it sends them as they happen, after those before; where
        `Last-Event-ID` says which was the last one seen, after that one. Who is too slow, or comes back too late,
        is told so by an event `gap`: between the numbers `after` and `before` there were others.
        """
        if not wants_stream(request):
            return service.recent_events.newest(last)
        recent, named = service.recent_events, request.headers.get("last-event-id", "")
        number = int(named) if named.isascii() and named.isdigit() and len(named) <= _DIGITS else None
        # One that is later than all is of a clock that was ahead.
        seen = number if number is not None and number <= recent.last else recent.before(last)
        return event_stream(_messages(service, seen))

    return router


async def _messages(service: Service, seen: int) -> AsyncIterator[bytes]:
    """The events after a number, until the service ends."""
    recent = service.recent_events
    while not service.draining.is_set():
        if not (found := recent.after(seen)):
            await first_of(recent.signal.changed(), service.draining.wait(), seconds=None)
            continue
        if recent.lacks(seen):
            yield message("gap", json.dumps({"after": seen, "before": found[0].number}).encode())
        for each in found:
            yield message("event", json.dumps(asdict(each)).encode(), each.number)
            seen = each.number
