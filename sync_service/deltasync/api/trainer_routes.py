"""Who publishes, and what came of it, over HTTP."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from deltasync.core.cut_times import KEPT_CUTS
from deltasync.service.service import Service
from deltasync.status.trainers import TrainerLine, trainer_lines
from deltasync.status.versions import VersionLine, last_cuts, version_lines

_Model = Annotated[str | None, Query(description="Only those of this model.")]
_Last = Annotated[int, Query(ge=1, le=KEPT_CUTS, description="How many of each model, at most.")]


def trainer_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/trainers")
    async def trainers() -> list[TrainerLine]:
        """The ranks that publish this process's models, or have published them since it started."""
        service.check_confirmed()
        return trainer_lines(service)

    @router.get("/versions")
    async def versions(model: _Model = None, last: _Last = 20) -> list[VersionLine]:
        """The last versions of this process's models, the newest first: since it started, 200 of each at most.

        `seconds` says how long each part of the way took: gather (reading the changed rows), send, seal (checks,
        and waiting for the version before), log (until it was durable), apply, release (until it was sent), ack.
        """
        service.check_confirmed()
        found = [each for _, each in sorted(service.models.items())] if model is None else [service.model(model)]
        cuts = [cut for each in found for cut in last_cuts([each], last)]
        return await asyncio.to_thread(version_lines, cuts)

    return router
