"""What takes a service long, over HTTP: checkpoints, backups, verifying, moving models between processes."""

import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from deltasync.access.caller import author
from deltasync.api.requests import json_object, text_of, while_wanted
from deltasync.core.verified import VerifiedLine
from deltasync.service.backup import Backups
from deltasync.service.fsck import Checked, check_service
from deltasync.service.hosting import drain_process
from deltasync.service.operators import verify_replica
from deltasync.service.service import Service
from deltasync.status.overview import unowned_models


def _body(key: str, words: str, example: str, *, required: bool) -> dict[str, Any]:
    """For /docs: a body with one text."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": words}},
        "required": [key] if required else [],
        "additionalProperties": False,
    }
    content = {"application/json": {"schema": schema, "example": {key: example}}}
    return {"requestBody": {"required": required, "content": content}}


_PLACE = "A folder, as an absolute path on the service's machine, or a URL; new or empty."
_BACKUP = _body("url", _PLACE, "s3://bucket/backups/monday", required=True)
_MOVE = _body("process", "The process that is to own the model.", "sync-1", required=True)
_DRAIN = _body("process", "The process to drain; this one unless given.", "sync-0", required=False)


@dataclass(frozen=True)
class BackupLine:
    """A backup that is complete: how many files it has, and how many bytes."""

    files: int
    bytes: int


@dataclass(frozen=True)
class MadeCheckpoint:
    """A complete checkpoint: its version, its bytes, and those that the checkpoint before it does not have."""

    version: int
    bytes: int
    new_bytes: int


@dataclass(frozen=True)
class VerifiedReplica:
    """What a replica found when it read its rows again, by table; `version` is the model's that it holds."""

    version: int
    tables: list[VerifiedLine]


@dataclass(frozen=True)
class DrainedProcess:
    """The models that a process has given up."""

    models: list[str]


def operation_routes(service: Service) -> APIRouter:
    """The routes. A request stays open until the work is done; a client that hangs up cancels it."""
    router, backups = APIRouter(), Backups(service)

    @router.post("/fsck")
    async def fsck(request: Request) -> list[Checked]:
        """Read everything that this process keeps, and report what is damaged. Needs role admin."""
        return await while_wanted(request, service, check_service(service, author()))

    @router.post("/backup", openapi_extra=_BACKUP)
    async def backup(request: Request) -> BackupLine:
        """Copy everything that the service keeps to a new or empty folder or URL. Needs role admin."""
        url = text_of(await json_object(request, ("url",)), "url")
        made = await while_wanted(request, service, backups.make(url, author()))
        return BackupLine(made.files, made.bytes)

    @router.post("/drain", openapi_extra=_DRAIN)
    async def drain(request: Request) -> DrainedProcess:
        """Give all models of a process to others. It takes none until it is started again. Needs role admin."""
        process = text_of(await json_object(request, ("process",), optional=True), "process", "")
        return DrainedProcess(await while_wanted(request, service, drain_process(service, process)))

    @router.post("/models/{name}/checkpoint")
    async def checkpoint(name: str, request: Request) -> MadeCheckpoint:
        """Write a checkpoint of a model now. Needs role admin."""
        made = await while_wanted(request, service, service.checkpoints.make(name))
        return MadeCheckpoint(made.version, made.bytes, made.new_bytes)

    @router.post("/models/{name}/move", status_code=204, openapi_extra=_MOVE)
    async def move(name: str, request: Request) -> None:
        """Give a model to another process, after a checkpoint of it. Needs role admin."""
        process = text_of(await json_object(request, ("process",)), "process")
        service.model(name)
        await while_wanted(request, service, service.owners.move(name, process))

    @router.post("/consumers/{name}/replicas/{replica}/verify")
    async def verify(name: str, replica: str, request: Request) -> VerifiedReplica:
        """Have a replica read all its rows again, and compare them with what it was sent. Needs role admin."""
        found = await while_wanted(request, service, verify_replica(service, name, replica, author()))
        return VerifiedReplica(found.version, [VerifiedLine.of(each) for each in found.tables])

    return router


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


@dataclass(frozen=True)
class ProcessLine:
    """A process of the service, in a list.

    `alive` is false if it went silent for longer than the lease without saying goodbye. `models` are the models
    that it owns. `here` marks the process that answers; its line has in `unowned` the models that no process has.
    `confirmed` says whether the process that answers may answer for its models. `started_unix_ns` is when the
    process started, by its own clock, 0 if unknown.
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


def process_lines(service: Service) -> list[ProcessLine]:
    """The processes of the service, as this one sees them: those that are alive first."""
    owners = service.owners
    names = sorted({*owners.models(), *service.models})
    owned = {name: owner.process for name in names if (owner := owners.owner_of(name))}
    alive, unowned = owners.processes(), unowned_models(service)
    return [
        ProcessLine(
            process=each.name,
            grpc=each.grpc,
            http=each.http,
            here=each.name == owners.me.name,
            alive=each in alive,
            draining=each.draining,
            confirmed=owners.confirmed,
            models=[name for name, process in owned.items() if process == each.name],
            unowned=unowned if each.name == owners.me.name else [],
            started_unix_ns=each.started,
        )
        for each in (*alive, *owners.gone())
    ]


def process_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/processes")
    async def processes() -> list[ProcessLine]:
        """All processes of the service, where each answers, and the models that each owns."""
        return process_lines(service)

    return router
