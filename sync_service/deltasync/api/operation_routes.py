"""Long operations over HTTP: checkpoints, backups, verification, and moving models between processes."""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request

from deltasync.access.roles import author
from deltasync.api.requests import json_object, text_body, text_of, while_wanted
from deltasync.base.events import Events, RecentEvents
from deltasync.cluster.owners import Owners
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.comparison import TableComparison
from deltasync.model.model import Model
from deltasync.service.backup import Backup, Backups
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers
from deltasync.service.following import Following
from deltasync.service.fsck import Checked, check_service
from deltasync.service.hosting import drain_process
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.service.operators import Brake, Removals, verify_replica
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
    brake: Brake
    data_dir: Path
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
    router, models, draining = APIRouter(), on.models, on.draining
    backups = Backups(models, on.checkpoints, on.data_dir, on.events, draining)

    @router.post("/fsck")
    async def fsck(request: Request) -> list[Checked]:
        """Check all data of this process for damage. Needs role admin."""
        checking = check_service(models, on.views, on.events, author())
        return await while_wanted(request, draining, checking)

    @router.post("/backup", openapi_extra=_BACKUP)
    async def backup(request: Request) -> Backup:
        """Back up the service to a new or empty folder or URL. Needs role admin."""
        url = text_of(await json_object(request, ("url",)), "url")
        return await while_wanted(request, draining, backups.make(url, author()))

    @router.post("/drain", openapi_extra=_DRAIN)
    async def drain(request: Request) -> DrainedProcess:
        """Move all models of a process to others. It takes over none until it restarts. Needs role admin."""
        process = text_of(await json_object(request, ("process",), optional=True), "process", "")
        return DrainedProcess(await while_wanted(request, draining, drain_process(models, process)))

    @router.post("/models/{name}/checkpoint")
    async def checkpoint(name: str, request: Request) -> MadeCheckpoint:
        """Write a checkpoint of a model now. Needs role admin."""
        made = await while_wanted(request, draining, on.checkpoints.make(name))
        return MadeCheckpoint(made.version, made.bytes, made.new_bytes)

    @router.post("/models/{name}/move", status_code=204, openapi_extra=_MOVE)
    async def move(name: str, request: Request) -> None:
        """Move a model to another process, after a checkpoint. Needs role admin."""
        process = text_of(await json_object(request, ("process",)), "process")
        models.model(name)
        await while_wanted(request, draining, models.owners.move(name, process))

    @router.post("/consumers/{name}/replicas/{replica}/verify")
    async def verify(name: str, replica: str, request: Request) -> VerifiedReplica:
        """Make a replica read all its rows again, and compare their checksums. Needs role admin."""
        verifying = verify_replica(on.registry, on.events, draining, name, replica, author())
        verified = await while_wanted(request, draining, verifying)
        return VerifiedReplica(verified.version, verified.tables)

    return router


@dataclass(frozen=True)
class CheckpointLine:
    """The newest checkpoint of a model.

    Without a checkpoint, `version` is 0 and `age_seconds` null. `behind_versions` counts the versions since.
    `new_bytes` counts the files not in the previous checkpoint. `copied_version` is the version of the newest
    checkpoint that is complete at the service's URL, or 0. `reason` is the error of the last attempt to write or
    copy a checkpoint, or to remove old ones; empty after success.
    """

    model: str
    version: int
    behind_versions: int
    age_seconds: float | None
    bytes: int
    new_bytes: int
    copied_version: int
    reason: str


def checkpoint_routes(models: Models, checkpoints: Checkpoints) -> APIRouter:
    """The route for checkpoints."""
    router = APIRouter()

    @router.get("/checkpoints", name="checkpoints")
    async def newest_checkpoints() -> list[CheckpointLine]:
        """The newest checkpoint of each of this process's models."""
        models.check_confirmed()
        return [_line(each, checkpoints.trouble(name)) for name, each in sorted(models.items())]

    return router


def _line(model: Model, reason: str) -> CheckpointLine:
    name, newest, head = model.name, model.checkpointed, model.seals.newest_version
    copied = model.checkpoints.copied_version
    if newest is None:
        return CheckpointLine(name, 0, head, None, 0, 0, copied, reason)
    age = round(max(0, time.time_ns() - newest.made_unix_ns) / 1e9, 3)
    behind = max(0, head - newest.version)
    return CheckpointLine(name, newest.version, behind, age, newest.bytes, newest.new_bytes, copied, reason)


@dataclass(frozen=True)
class ProcessLine:
    """A process of the service in a list.

    `alive` is false if its lease expired without a goodbye. `models` are the models that it
    owns. `here` marks the answering process, whose `unowned` lists the models without an owner. `confirmed` is
    whether the answering process may answer for its models. `started_unix_ns` is the start of the process by its
    own clock, or 0 if unknown.
    """

    process: str
    grpc: str
    http: str
    here: bool
    alive: bool
    draining: bool
    confirmed: bool
    models: list[str]
    unowned: list[str]
    started_unix_ns: int


def process_routes(models: Models) -> APIRouter:
    """The route for processes."""
    router = APIRouter()

    @router.get("/processes")
    async def processes() -> list[ProcessLine]:
        """The processes of the service, with their addresses and models."""
        return process_lines(models.owners, models)

    return router


def process_lines(owners: Owners, models: Collection[str]) -> list[ProcessLine]:
    """The processes of the service as seen by this one, which serves `models`. Running ones come first."""
    # Leases expire while this runs, so each model and each process is looked up once and listed once.
    owner_of = {name: owners.owner_of(name) for name in sorted({*owners.models(), *models})}
    unowned = [name for name, owner in owner_of.items() if owner is None and name not in models]
    alive = owners.processes()
    gone = [each for each in owners.gone() if each not in alive]
    return [
        ProcessLine(
            process=each.name,
            grpc=each.grpc,
            http=each.http,
            here=each.name == owners.me.name,
            alive=each in alive,
            draining=each.draining,
            confirmed=owners.confirmed,
            models=[name for name, owner in owner_of.items() if owner and owner.process == each.name],
            unowned=unowned if each.name == owners.me.name else [],
            started_unix_ns=each.started,
        )
        for each in (*alive, *gone)
    ]


_PLACE = "A URL, or the absolute path of a folder on the service's machine; it must be new or empty."


_BACKUP = text_body("url", _PLACE, "s3://bucket/backups/monday", required=True)


_MOVE = text_body("process", "The new owner of the model.", "sync-1", required=True)


_DRAIN = text_body("process", "The process to drain; by default this one.", "sync-0", required=False)
