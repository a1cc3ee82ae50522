"""The checkpoints that a service knows of, over HTTP."""

import time
from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.service.service import Service


@dataclass(frozen=True)
class CheckpointLine:
    """The newest checkpoint of a model.

    `version` is 0, and `age_seconds` null, where there is none. `behind_versions` counts the versions since.
    `new_bytes` are those of the files that it does not share with the checkpoint before it. `copied_version` is
    that of the newest checkpoint at the service's URL, 0 where there is none. `reason` says why the last try to
    write or copy one has failed; empty if it has not.
    """

    model: str
    version: int
    behind_versions: int
    age_seconds: float | None
    bytes: int
    new_bytes: int
    copied_version: int
    reason: str


def checkpoint_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/checkpoints")
    async def checkpoints() -> list[CheckpointLine]:
        """The newest checkpoint of each of this process's models."""
        service.check_confirmed()
        return [_line(service, name) for name in sorted(service.models)]

    return router


def _line(service: Service, name: str) -> CheckpointLine:
    model = service.models[name]
    newest, head, reason = model.checkpointed, model.seals.newest_version, service.checkpoints.failure(name)
    copied = model.checkpoints.copied_version
    if newest is None:
        return CheckpointLine(name, 0, head, None, 0, 0, copied, reason)
    age = round(max(0, time.time_ns() - newest.made_unix_ns) / 1e9, 3)
    behind = max(0, head - newest.version)
    return CheckpointLine(name, newest.version, behind, age, newest.bytes, newest.new_bytes, copied, reason)
