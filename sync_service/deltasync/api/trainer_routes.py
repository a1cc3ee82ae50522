"""Who publishes, and what came of it, over HTTP."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from deltasync.core.cut_times import KEPT_CUTS
from deltasync.core.errors import NotFound
from deltasync.core.words import listed
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
        """The ranks that publish, or have published since the service started, of all models."""
        return trainer_lines(service)

    @router.get("/versions")
    async def versions(model: _Model = None, last: _Last = 20) -> list[VersionLine]:
        """The last versions, the newest first: since the service started, 200 of each model at most.

        `seconds` says how long each part of the way took: gather (reading the changed rows), send, seal (checks,
        and waiting for the version before), log (until it was durable), apply, release (until it was sent), ack.
        """
        if model is not None and model not in service.models:
            service.check_recovered(model)  # Of another process's model the others are asked.
            known = sorted({*service.models, *service.owners.models()})
            raise NotFound(f"no model {model!r}", detail=f"; models: {listed(known) or 'none yet'}")
        found = sorted(service.models) if model is None else [model]
        cuts = [cut for name in found for cut in last_cuts([service.models[name]], last)]
        return await asyncio.to_thread(version_lines, cuts)

    return router
