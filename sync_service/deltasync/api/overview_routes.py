"""What the service is, how it is and what has happened, over HTTP: as JSON, or as it happens."""

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
from deltasync.api.requests import json_object
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.events import KEPT_EVENTS, EventKind, Events, RecentEvent, RecentEvents
from deltasync.base.logs import LEVELS, levels, set_levels
from deltasync.base.process import built_commit, built_version
from deltasync.base.waiting import first_of
from deltasync.base.words import printable, utc
from deltasync.checkpoints.manifest import FORMAT as CHECKPOINT_FORMAT
from deltasync.log.records import FORMAT as LOG_FORMAT
from deltasync.status.answers import LagHistory, Sampler
from deltasync.status.lag import ConsumerLag
from deltasync.status.overview import ConsumerOverview, Overview, consumer_overviews
from deltasync.status.readiness import Check, checks, not_ready, troubles
from deltasync.wire.errors import PROTOCOL


@dataclass(frozen=True)
class VersionInfo:
    """Which deltasync answers, and since when. There is no `commit` where it is not known.

    `grpc` is where it answers gRPC, as it knows that itself. `formats` are those that it reads and writes.
    """

    version: str
    python: str
    process: str
    grpc: str
    started: str
    formats: dict[str, int]
    commit: str | None = None


class _Metrics(Response):
    """Metrics, as Prometheus reads them."""

    media_type = CONTENT_TYPE_LATEST


_Verbose = Annotated[bool, Query(description="Say every check by name.")]


MEDIA_TYPE = "text/event-stream"
_OVERVIEW_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"One; or, to whoever accepts {MEDIA_TYPE}, a stream.", "content": {MEDIA_TYPE: {}}}
}


def overview_routes(sampler: Sampler, access: Access) -> APIRouter:
    """The routes."""
    router, sources = APIRouter(), sampler.sources

    @router.get("/status", response_model=Overview, responses=_OVERVIEW_STREAM)
    async def status(request: Request) -> Any:
        """Everything of this process on one screen, as it is now; or, to whoever accepts text/event-stream, about
        once a second.
        """
        return event_stream(_overview_messages(sampler)) if wants_stream(request) else await sampler.look()

    @router.get("/version", response_model_exclude_none=True)
    async def version() -> VersionInfo:
        """Which deltasync this is, and since when it runs."""
        formats = {"protocol": PROTOCOL, "log": LOG_FORMAT, "checkpoint": CHECKPOINT_FORMAT}
        me, started = sources.models.owners.me, utc(sources.process.started_unix_ns)
        python = platform.python_version()
        return VersionInfo(built_version(), python, me.name, me.grpc, started, formats, built_commit() or None)

    @router.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process answers."""
        return "ok\n"

    @router.get("/readyz", response_class=PlainTextResponse)
    async def readyz(verbose: _Verbose = False) -> Response:
        """Whether the service accepts streams. After the ok come the problems of single models and consumers, for
        callers with role read, and, for all, that others reach the service although it lets in anybody.
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
        """Everything above as Prometheus metrics."""
        return _Metrics(await sampler.answers.metrics())

    return router


def _check_lines(every: list[Check]) -> str:
    return "".join(f"{'+' if each.ok else '-'} {each.check}: {_line(each.trouble) or 'ok'}\n" for each in every)


_LONGEST_LINE = 2_000


def _line(text: str) -> str:
    """Escape a text that may contain names of tables, because people read it on a terminal."""
    return printable(text, _LONGEST_LINE)


async def _overview_messages(sampler: Sampler) -> AsyncIterator[bytes]:
    async for data in sampler.watch():
        yield message("status", data)


def lag_routes(sampler: Sampler) -> APIRouter:
    """The routes."""
    routes, answers, sources = APIRouter(), sampler.answers, sampler.sources

    @routes.get("/lag")
    async def lags() -> list[ConsumerOverview]:
        """How far the consumers of this process are behind, each in one line."""
        sources.models.check_confirmed()
        return consumer_overviews(sources.models, sources.registry, await answers.lags())

    @routes.get("/consumers/{name}/lag")
    async def lag(name: str) -> ConsumerLag:
        """How far a consumer is behind its model: in versions, rows, bytes, seconds and unsent norm.

        Per replica and per table, with one word for the state and the reason for it.
        """
        return await answers.lag(name)

    @routes.get("/consumers/{name}/history")
    async def history(name: str) -> LagHistory:
        """How far a consumer has been behind over the last minutes."""
        return sampler.histories.of(sources.consumers.get(name).name)

    return routes


_EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"A list; or, to whoever accepts {MEDIA_TYPE}, a stream.", "content": {MEDIA_TYPE: {}}}
}


# Digits of the largest number that an event can have.
_DIGITS = 20


_Last = Annotated[int, Query(ge=0, le=KEPT_EVENTS, description="How many of those before are wanted, at most.")]


def event_routes(recent: RecentEvents, draining: asyncio.Event) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/events", response_model=list[RecentEvent], responses=_EVENT_STREAM)
    async def events(request: Request, last: _Last = 100) -> Any:
        """The last events of this process: joins, refusals, repairs, takeovers.

        To whoever accepts text/event-stream it sends them as they happen, after those before; where
        `Last-Event-ID` says which was the last one seen, after that one. Who is too slow, or comes back too late,
        is told so by an event `gap`: between the numbers `after` and `before` there were others.
        """
        if not wants_stream(request):
            return recent.newest(last)
        named = request.headers.get("last-event-id", "")
        number = int(named) if named.isascii() and named.isdigit() and len(named) <= _DIGITS else None
        # A number after the last one comes from a clock that was ahead.
        seen = number if number is not None and number <= recent.last else recent.before(last)
        return event_stream(_event_messages(recent, draining, seen))

    return router


async def _event_messages(recent: RecentEvents, draining: asyncio.Event, seen: int) -> AsyncIterator[bytes]:
    """The events after a number, until the service ends."""
    while not draining.is_set():
        if not (later := recent.after(seen)):
            await first_of(recent.signal.changed(), draining.wait(), seconds=None)
            continue
        if recent.lacks(seen):
            yield message("gap", json.dumps({"after": seen, "before": later[0].number}).encode())
        for each in later:
            yield message("event", json.dumps(asdict(each)).encode(), each.number)
            seen = each.number


_MAX_BODY_BYTES = 4 << 10


_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"logger": {"type": "string"}, "level": {"enum": list(LEVELS)}},
                "required": ["level"],
                "additionalProperties": False,
            },
            "example": {"logger": "deltasync.api", "level": "debug"},
        }
    },
}


def log_routes(events: Events) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/log-levels")
    async def show() -> dict[str, str]:
        """The levels of those of this process's loggers that have one of their own."""
        return levels()

    @router.put("/log-levels", openapi_extra={"requestBody": _BODY})
    async def change(request: Request) -> dict[str, str]:
        """Write messages of this process from another level on, until it ends; of one logger, or of all.

        Needs role admin.
        """
        by = author()
        body = await json_object(request, ("logger", "level"), _MAX_BODY_BYTES)
        logger, level = body.get("logger", "deltasync"), body.get("level")
        if not isinstance(level, str) or not isinstance(logger, str) or "," in f"{logger}{level}":
            raise InvalidInput(f"body: expected a level, one of {', '.join(LEVELS)}, and the name of a logger")
        set_levels(f"{logger}={level}")
        events.emit(EventKind.LOG_LEVEL_CHANGED, f"from {level} on", name=logger, by=by)
        return levels()

    return router


MEDIA_TYPE = "text/event-stream"


# Where nothing else comes, a comment comes this often: without it, the connection is lost.
BEAT_SECONDS = 5.0


_BEAT = b": beat\n\n"


def wants_stream(request: Request) -> bool:
    """Whether the client asks for a stream."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One event, whose data are one line."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"


def event_stream(messages: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer that ends with the last message."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_beats(messages), media_type=MEDIA_TYPE, headers=headers)


async def _with_beats(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield _BEAT  # At once: the client sees that it has a connection.
    coming = asyncio.ensure_future(anext(messages, None))
    try:
        while True:
            await asyncio.wait([coming], timeout=BEAT_SECONDS)
            if not coming.done():
                yield _BEAT
                continue
            if (data := coming.result()) is None:
                return
            yield data
            coming = asyncio.ensure_future(anext(messages, None))
    finally:
        coming.cancel()
