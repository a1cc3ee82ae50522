"""Status, events and log levels over HTTP, as JSON or as event streams."""

import asyncio
import json
import platform
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from deltasync.access.rights import Access
from deltasync.access.roles import author, may_read
from deltasync.api.requests import EncodedRoute, LevelBody
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.events import KEPT_EVENTS, EventKind, Events, RecentEvent, RecentEvents
from deltasync.base.logs import levels, set_levels
from deltasync.base.process import built_commit, built_version
from deltasync.base.waiting import first_of
from deltasync.base.words import printable, utc
from deltasync.checkpoints.manifest import FORMAT as CHECKPOINT_FORMAT
from deltasync.log.records import FORMAT as LOG_FORMAT
from deltasync.status.answers import Sampler
from deltasync.status.process import checks, not_ready, troubles
from deltasync.status.records import Check, Overview
from deltasync.wire.errors import PROTOCOL


@dataclass(frozen=True)
class VersionInfo:
    """The version of the service and its start time. `commit` is missing if unknown.

    `grpc` is the process's own gRPC address. `formats` has the versions of the formats that it reads and writes.
    """

    version: str
    python: str
    process: str
    grpc: str
    started: str
    formats: dict[str, int]
    commit: str | None = None


class _Metrics(Response):
    """Metrics in the format of Prometheus."""

    media_type = CONTENT_TYPE_LATEST


_Verbose = Annotated[bool, Query(description="List every check by name.")]


MEDIA_TYPE = "text/event-stream"
_OVERVIEW_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"A status; a stream if the request accepts {MEDIA_TYPE}.", "content": {MEDIA_TYPE: {}}}
}


def overview_routes(sampler: Sampler, access: Access) -> APIRouter:
    """Routes for the status, version, readiness and metrics of this process."""
    router, sources = APIRouter(route_class=EncodedRoute), sampler.sources

    @router.get("/status", response_model=Overview, responses=_OVERVIEW_STREAM)
    async def status(request: Request) -> Any:
        """The status of this process. A request that accepts text/event-stream gets it about once a second."""
        return event_stream(_overview_messages(sampler)) if wants_stream(request) else await sampler.look()

    @router.get("/version", response_model_exclude_none=True)
    async def version() -> VersionInfo:
        """The version of the service and its start time."""
        formats = {"protocol": PROTOCOL, "log": LOG_FORMAT, "checkpoint": CHECKPOINT_FORMAT}
        me, started = sources.models.owners.me, utc(sources.process.started_unix_ns)
        python = platform.python_version()
        return VersionInfo(built_version(), python, me.name, me.grpc, started, formats, built_commit() or None)

    @router.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """Whether the process answers."""
        return "ok\n"

    @router.get("/readyz", response_class=PlainTextResponse)
    async def readyz(verbose: _Verbose = False) -> Response:
        """Whether the service accepts streams.

        Below the ok, it warns if other machines can reach a service without access control. Callers with role read
        also get the problems of individual models and consumers.
        """
        every = checks(sources)
        reason = not_ready(every)
        lacks = (access.trouble, *troubles(sources)) if may_read() else ()
        more = "".join(f"{_line(each)}\n" for each in (access.exposure, *lacks) if each)
        if verbose and may_read():
            return PlainTextResponse(_check_lines(every) + more, 503 if reason else 200)
        if reason:
            raise ServiceUnavailable(reason if may_read() else "the service is not ready")
        return PlainTextResponse(f"ok\n{more}")

    @router.get("/metrics", response_class=_Metrics)
    async def metrics() -> Response:
        """The metrics of this process, for Prometheus."""
        return _Metrics(await sampler.answers.metrics())

    return router


def _check_lines(every: list[Check]) -> str:
    return "".join(f"{'+' if each.ok else '-'} {each.check}: {_line(each.trouble) or 'ok'}\n" for each in every)


_LONGEST_LINE = 2_000


def _line(text: str) -> str:
    """Escape a text for a terminal, as it may contain names of tables."""
    return printable(text, _LONGEST_LINE)


async def _overview_messages(sampler: Sampler) -> AsyncIterator[bytes]:
    async for data in sampler.watch():
        yield message("status", data)


_EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"A list; a stream if the request accepts {MEDIA_TYPE}.", "content": {MEDIA_TYPE: {}}}
}


# Digits of the largest number of an event.
_DIGITS = 20


_Last = Annotated[int, Query(ge=0, le=KEPT_EVENTS, description="Maximum number of earlier events to return.")]


def event_routes(recent: RecentEvents, draining: asyncio.Event) -> APIRouter:
    """The route for events."""
    router = APIRouter(route_class=EncodedRoute)

    @router.get("/events", response_model=list[RecentEvent], responses=_EVENT_STREAM)
    async def events(request: Request, last: _Last = 100) -> Any:
        """The last events of this process: joins, refusals, repairs, takeovers.

        A request that accepts text/event-stream gets earlier events and then new ones as they happen. With
        `Last-Event-ID` it continues after that event. If the client is too slow, or reconnects too late, an event
        `gap` reports that it missed events between the numbers `after` and `before`.
        """
        if not wants_stream(request):
            return recent.newest(last)
        last_id = request.headers.get("last-event-id", "")
        number = int(last_id) if last_id.isascii() and last_id.isdigit() and len(last_id) <= _DIGITS else None
        # A number beyond the last event comes from a clock that was ahead.
        seen = number if number is not None and number <= recent.last else recent.before(last)
        return event_stream(_event_messages(recent, draining, seen))

    return router


async def _event_messages(recent: RecentEvents, draining: asyncio.Event, seen: int) -> AsyncIterator[bytes]:
    """Yield the events after a number until shutdown."""
    while not draining.is_set():
        if not (later := recent.after(seen)):
            await first_of(recent.signal.changed(), draining.wait(), seconds=None)
            continue
        if recent.lacks(seen):
            yield message("gap", json.dumps({"after": seen, "before": later[0].number}).encode())
        for each in later:
            yield message("event", json.dumps(asdict(each)).encode(), each.number)
            seen = each.number


def log_routes(events: Events) -> APIRouter:
    """Routes for log levels."""
    router = APIRouter(route_class=EncodedRoute)

    @router.get("/log-levels")
    async def show() -> dict[str, str]:
        """The loggers of this process with a level of their own."""
        return levels()

    @router.put("/log-levels")
    async def change(body: LevelBody) -> dict[str, str]:
        """Set the lowest level to log, for one logger or all, until this process ends. Needs role admin."""
        if "," in f"{body.logger}{body.level}":
            raise InvalidInput("body: expected the name of one logger")
        set_levels(f"{body.logger}={body.level}")
        text = f"lowest level is {body.level}"
        events.emit(EventKind.LOG_LEVEL_CHANGED, text, name=body.logger, by=author())
        return levels()

    return router


MEDIA_TYPE = "text/event-stream"


# Interval of comments on a quiet stream. A client that gets none considers the connection lost.
BEAT_SECONDS = 5.0


_BEAT = b": beat\n\n"


def wants_stream(request: Request) -> bool:
    """Whether the request accepts a stream."""
    return not request.scope.get("is_head") and MEDIA_TYPE in request.headers.get("accept", "")


def message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """Encode a server-sent event with one line of data."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"


def event_stream(messages: AsyncIterator[bytes]) -> StreamingResponse:
    """Stream messages as an answer, with beats between them."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_beats(messages), media_type=MEDIA_TYPE, headers=headers)


async def _with_beats(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield _BEAT  # At once, so that the client notices the connection.
    upcoming = asyncio.ensure_future(anext(messages, None))
    try:
        while True:
            await asyncio.wait([upcoming], timeout=BEAT_SECONDS)
            if not upcoming.done():
                yield _BEAT
                continue
            if (data := upcoming.result()) is None:
                return
            yield data
            upcoming = asyncio.ensure_future(anext(messages, None))
    finally:
        upcoming.cancel()
