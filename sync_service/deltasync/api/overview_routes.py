"""What the service is and how it is, over HTTP."""

import platform
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from deltasync.api.access import Access
from deltasync.api.caller import may_read
from deltasync.api.event_stream import MEDIA_TYPE, event_stream, message, wants_stream
from deltasync.checkpoints.manifest import FORMAT as CHECKPOINT_FORMAT
from deltasync.core.build import built_commit, built_version
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.words import printable, utc
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.overview import Overview, troubles
from deltasync.status.readiness import Check, checks, not_ready
from deltasync.status.sampler import Sampler
from deltasync.storage.log_format import FORMAT as LOG_FORMAT
from deltasync.wire.protocol import PROTOCOL

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": f"One; or, to whoever accepts {MEDIA_TYPE}, a stream.", "content": {MEDIA_TYPE: {}}}
}
_LONGEST_LINE = 2_000
_Verbose = Annotated[bool, Query(description="Say every check by name.")]


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


def overview_routes(service: Service, access: Access, answers: Answers, sampler: Sampler) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/status", response_model=Overview, responses=_STREAM)
    async def status(request: Request) -> Any:
        """Everything of this process on one screen, as it is now; or, to whoever accepts text/event-stream, about
        once a second.
        """
        return event_stream(_messages(sampler)) if wants_stream(request) else await sampler.look()

    @router.get("/version", response_model_exclude_none=True)
    async def version() -> VersionInfo:
        """Which deltasync this is, and since when it runs."""
        formats = {"protocol": PROTOCOL, "log": LOG_FORMAT, "checkpoint": CHECKPOINT_FORMAT}
        me, started = service.owners.me, utc(service.started_unix_ns)
        python = platform.python_version()
        return VersionInfo(built_version(), python, me.name, me.grpc, started, formats, built_commit() or None)

    @router.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process answers."""
        return "ok\n"

    @router.get("/readyz", response_class=PlainTextResponse)
    async def readyz(verbose: _Verbose = False) -> Response:
        """The service takes streams. What only one model or one consumer lacks is said after the ok, to those who
        may read; and where others reach the service although it lets in anybody, to all.
        """
        found = checks(service)
        reason = not_ready(found)
        lacks = (access.trouble, *troubles(service)) if may_read() else ()
        more = "".join(f"{_line(each)}\n" for each in (access.exposure, *lacks) if each)
        if verbose and may_read():
            return PlainTextResponse(_said(found) + more, 503 if reason else 200)
        if reason:
            raise ServiceUnavailable(reason if may_read() else "the service is not ready")
        return PlainTextResponse(f"ok\n{more}")

    @router.get("/metrics", response_class=_Metrics)
    async def metrics() -> Response:
        """Everything above as Prometheus metrics."""
        return _Metrics(await answers.metrics())

    return router


def _said(found: list[Check]) -> str:
    return "".join(f"{'+' if each.ok else '-'} {each.check}: {_line(each.trouble) or 'ok'}\n" for each in found)


def _line(text: str) -> str:
    """Escape a text that may have names of tables in it: it is looked at on a terminal."""
    return printable(text, _LONGEST_LINE)


async def _messages(sampler: Sampler) -> AsyncIterator[bytes]:
    async for data in sampler.watch():
        yield message("status", data)
