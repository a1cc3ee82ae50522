"""Kept versions over HTTP."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from deltasync.access.roles import author
from deltasync.api.operation_routes import Collaborators
from deltasync.api.requests import json_object, text_body, text_of, while_wanted
from deltasync.base.errors import InvalidInput
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.service.rollback import roll_back


@dataclass(frozen=True)
class KeptLine:
    """A kept version.

    `name` may be empty. Times are nanoseconds since 1970; `event_time_unix_ns` is the time of the newest event on
    which it was trained, null if unknown. `bytes` is the size of the files of its checkpoint, and `own_bytes` the
    size of those that nothing else needs, null if its checkpoint cannot be read. `followers` are the consumers
    that follow it.
    """

    model: str
    version: int
    name: str
    step: int
    event_time_unix_ns: int | None
    kept_unix_ns: int
    by: str
    bytes: int
    own_bytes: int | None
    followers: list[str]


@dataclass(frozen=True)
class RollbackLine:
    """The newest version of a model after a rollback."""

    model: str
    version: int


def version_routes(on: Collaborators) -> APIRouter:
    """The routes of kept versions."""
    router, versions = APIRouter(), on.versions

    @router.get("/models/{name}/versions", response_model=list[KeptLine])
    async def kept_versions(name: str) -> Response:
        """The kept versions of a model, oldest first."""
        kept, followers = await versions.kept(name), versions.followers_of(name)
        # In a thread, and line by line, because cuts must not wait for thousands of lines.
        return Response(await asyncio.to_thread(_json, kept, followers), media_type="application/json")

    @router.post("/models/{name}/versions", openapi_extra=_KEEP)
    async def keep(name: str, request: Request) -> KeptLine:
        """Keep the newest version of a model. Needs role admin."""
        kept_name = text_of(await json_object(request, ("name",), optional=True), "name", "")
        kept = await while_wanted(request, on.draining, versions.keep(name, kept_name, author()))
        return _line(kept, 0, [])

    @router.delete("/models/{name}/versions/{version}", status_code=204)
    async def release(name: str, version: str) -> None:
        """Stop keeping a version, given by its name or number. Needs role admin."""
        await versions.release(name, version, author())

    @router.post("/models/{name}/rollback", openapi_extra=_ROLLBACK)
    async def rollback(name: str, request: Request) -> RollbackLine:
        """Make the rows of a kept version the newest version of a model. Needs role admin.

        Replicas of consumers that follow the newest version get them. The running trainer is stopped. With
        `accept_any` the service also admits trainers without a DeltaSync state.
        """
        by, body = author(), await json_object(request, ("version", "accept_any"))
        version, accept_any = text_of(body, "version"), body.get("accept_any", False)
        if not isinstance(accept_any, bool):
            raise InvalidInput("body: expected accept_any to be true or false")
        rolled_back = roll_back(on.models, name, version, on.events, by, accept_any=accept_any)
        position = await while_wanted(request, on.draining, rolled_back)
        return RollbackLine(name, position.number)

    return router


def _json(kept: Sequence[tuple[KeptVersion, int | None]], followers: Mapping[str, list[str]]) -> str:
    lines = (vars(_line(each, own_bytes, followers.get(each.id, []))) for each, own_bytes in kept)
    return f"[{','.join(map(json.dumps, lines))}]"


def _line(kept: KeptVersion, own_bytes: int | None, followers: list[str]) -> KeptLine:
    return KeptLine(
        model=kept.model,
        version=kept.version,
        name=kept.name,
        step=kept.seal.step,
        event_time_unix_ns=kept.seal.event_time_unix_ns,
        kept_unix_ns=kept.kept_unix_ns,
        by=kept.by,
        bytes=kept.bytes,
        own_bytes=own_bytes,
        followers=followers,
    )


_ROLLBACK = text_body(
    "version",
    "Name or number of a kept version.",
    "before-launch",
    required=True,
    accept_any="Also admit trainers without a DeltaSync state.",
)
_KEEP = text_body("name", "A name, which lasts until release.", "before-launch", required=False)
