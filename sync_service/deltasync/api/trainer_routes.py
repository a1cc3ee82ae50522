"""Who publishes, and what came of it, over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query

from deltasync.core.cut_times import KEPT_CUTS
from deltasync.service.service import Service
from deltasync.status.trainers import TrainerLine, trainer_lines
from deltasync.status.versions import VersionLine, version_lines

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
        found = sorted(service.models) if model is None else [service.model(model).name]
        return [line for name in found for line in version_lines(service.models[name], last)]

    return router
