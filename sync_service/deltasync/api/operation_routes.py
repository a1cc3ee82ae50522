"""What operators have a service do that takes long: look, copy, verify, move. All of it needs role admin."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from deltasync.api.caller import author
from deltasync.api.json_body import json_object, text_of
from deltasync.api.long_requests import while_wanted
from deltasync.core.verified import VerifiedLine
from deltasync.service.backup import Backups
from deltasync.service.fsck import Checked, check_service
from deltasync.service.processes import drain_process
from deltasync.service.service import Service
from deltasync.service.verification import verify_replica


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
