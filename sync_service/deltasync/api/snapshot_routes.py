"""The snapshots that a service knows of, over HTTP."""

import time
from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.service.service import Service

_NONE_ARE_MADE = "none are made: deltasync serve --snapshots URL says where they go"


@dataclass(frozen=True)
class SnapshotLine:
    """The newest snapshot of a model, in a list.

    `version` is the one that it is of, 0 where there is none, with null for its age. `behind_versions` is how many
    came since; `reason` says why none is made, or why the last try to make one has failed, if it has.
    """

    model: str
    version: int
    behind_versions: int
    age_seconds: float | None
    bytes: int
    new_bytes: int
    reason: str


def snapshot_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/snapshots")
    async def snapshots() -> list[SnapshotLine]:
        """The newest snapshot of each of this process's models."""
        service.check_confirmed()
        return [_line(service, name) for name in sorted(service.models)]

    return router


def _line(service: Service, name: str) -> SnapshotLine:
    newest = service.snapshots.newest(name) if service.snapshots else None
    head = service.models[name].seals.newest_version
    reason = service.snapshots.failure(name) if service.snapshots else _NONE_ARE_MADE
    if newest is None:
        return SnapshotLine(name, 0, head, None, 0, 0, reason)
    age = round(max(0, time.time_ns() - newest.made_unix_ns) / 1e9, 3)
    behind = max(0, head - newest.version)
    return SnapshotLine(name, newest.version, behind, age, newest.bytes, newest.new_bytes(), reason)
