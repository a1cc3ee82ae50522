"""Kept versions over HTTP."""

import asyncio
import json
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from deltasync.access.roles import author
from deltasync.api.operation_routes import Collaborators
from deltasync.api.requests import EncodedRoute, KeepBody, RollbackBody, while_wanted
from deltasync.service.rollback import roll_back
from deltasync.status.overview import kept_status
from deltasync.status.records import KeptStatus


@dataclass(frozen=True)
class RolledBack:
    """The newest version of a model after a rollback."""

    model: str
    version: int


def version_routes(on: Collaborators) -> APIRouter:
    """The routes of kept versions."""
    router, versions = APIRouter(route_class=EncodedRoute), on.versions

    @router.get("/models/{name}/versions", response_model=list[KeptStatus])
    async def kept_versions(name: str) -> Response:
        """The kept versions of a model, oldest first."""
        kept, followers = await versions.kept(name), versions.followers_of(name)

        def answer() -> str:
            lines = (vars(kept_status(each, followers, own)) for each, own in kept)
            return f"[{','.join(map(json.dumps, lines))}]"

        # In a thread, and line by line, because cuts must not wait for thousands of lines.
        return Response(await asyncio.to_thread(answer), media_type="application/json")

    @router.post("/models/{name}/versions")
    async def keep(name: str, request: Request, body: KeepBody | None = None) -> KeptStatus:
        """Keep the newest version of a model. Needs role admin."""
        keeping = versions.keep(name, body.name if body else "", author())
        kept = await while_wanted(request, on.draining, keeping)
        return kept_status(kept, {}, 0)

    @router.delete("/models/{name}/versions/{version}", status_code=204)
    async def release(name: str, version: str) -> None:
        """Stop keeping a version, given by its name or number. Needs role admin."""
        await versions.release(name, version, author())

    @router.post("/models/{name}/rollback")
    async def rollback(name: str, body: RollbackBody, request: Request) -> RolledBack:
        """Make the rows of a kept version the newest version of a model. Needs role admin.

        Replicas of consumers that follow the newest version get them. The running trainer is stopped. With
        `accept_any` the service also admits trainers without a DeltaSync state.
        """
        rolled_back = roll_back(on.models, name, body.version, on.events, author(), accept_any=body.accept_any)
        position = await while_wanted(request, on.draining, rolled_back)
        return RolledBack(name, position.number)

    return router
