"""Long operations over HTTP: checkpoints, backups, verification, and moving models between processes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request

from deltasync.access.roles import author
from deltasync.api.requests import BackupBody, DrainBody, EncodedRoute, MoveBody, while_wanted
from deltasync.base.events import Events, RecentEvents
from deltasync.consumers.consumer import TableComparison
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.service.backup import Backup, Backups
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers
from deltasync.service.following import Following
from deltasync.service.fsck import Checked, check_service
from deltasync.service.hosting import drain_process
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.service.operators import ConsumerPauses, Removals, verify_replica
from deltasync.service.options import ServiceOptions
from deltasync.service.serving_history import Histories
from deltasync.views.registry import ViewRegistry


@dataclass(frozen=True, kw_only=True)
class Collaborators:
    """The parts of the service that routes use; `draining` is set at shutdown."""

    models: Models
    registry: ConsumerRegistry
    consumers: Consumers
    views: ViewRegistry
    checkpoints: Checkpoints
    versions: Versions
    histories: Histories
    following: Following
    removals: Removals
    pauses: ConsumerPauses
    options: ServiceOptions
    events: Events
    recent_events: RecentEvents
    draining: asyncio.Event


@dataclass(frozen=True)
class MadeCheckpoint:
    """The version and size of a complete checkpoint, and the size of files not in the previous one."""

    version: int
    bytes: int
    new_bytes: int


@dataclass(frozen=True)
class VerifiedReplica:
    """The result of a replica's verification by table, at a `version` of the model."""

    version: int
    tables: Sequence[TableComparison]


@dataclass(frozen=True)
class DrainedProcess:
    """The models that a process handed over."""

    models: list[str]


def operation_routes(on: Collaborators) -> APIRouter:
    """The routes. A request stays open during the work, and a client that hangs up cancels it."""
    router, models, draining = APIRouter(route_class=EncodedRoute), on.models, on.draining
    backups = Backups(models, on.checkpoints, on.options.data_dir, on.events, draining)

    @router.post("/fsck")
    async def fsck(request: Request) -> list[Checked]:
        """Check all data of this process for damage. Needs role admin."""
        checking = check_service(models, on.views, on.events, author())
        return await while_wanted(request, draining, checking)

    @router.post("/backup")
    async def backup(body: BackupBody, request: Request) -> Backup:
        """Back up the service to a new or empty folder or URL. Needs role admin."""
        return await while_wanted(request, draining, backups.make(body.url, author()))

    @router.post("/drain")
    async def drain(request: Request, body: DrainBody | None = None) -> DrainedProcess:
        """Move all models of a process to others. It takes over none until it restarts. Needs role admin."""
        process = body.process if body else ""
        return DrainedProcess(await while_wanted(request, draining, drain_process(models, process)))

    @router.post("/models/{name}/checkpoint")
    async def checkpoint(name: str, request: Request) -> MadeCheckpoint:
        """Write a checkpoint of a model now. Needs role admin."""
        made = await while_wanted(request, draining, on.checkpoints.make(name))
        return MadeCheckpoint(made.version, made.bytes, made.new_bytes)

    @router.post("/models/{name}/move", status_code=204)
    async def move(name: str, body: MoveBody, request: Request) -> None:
        """Move a model to another process, after a checkpoint. Needs role admin."""
        models.model(name)
        await while_wanted(request, draining, models.owners.move(name, body.process))

    @router.post("/consumers/{name}/replicas/{replica}/verify")
    async def verify(name: str, replica: str, request: Request) -> VerifiedReplica:
        """Make a replica read all its rows again, and compare their checksums. Needs role admin."""
        verifying = verify_replica(on.registry, on.events, draining, name, replica, author())
        verified = await while_wanted(request, draining, verifying)
        return VerifiedReplica(verified.version, verified.tables)

    return router
