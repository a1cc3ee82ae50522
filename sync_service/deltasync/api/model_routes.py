"""Models, tables, ranks, versions, also kept ones, and pending deletes over HTTP."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from deltasync.access.roles import author
from deltasync.api.operation_routes import Collaborators
from deltasync.api.requests import DeleteBody, EncodedRoute, KeepBody, RollbackBody, while_wanted
from deltasync.base.errors import NotFound
from deltasync.core.cut_times import KEPT_CUTS
from deltasync.service.models import Models
from deltasync.service.operators import PendingDelete, Removals
from deltasync.service.rollback import roll_back
from deltasync.status.answers import Answers
from deltasync.status.overview import (
    kept_status,
    last_cuts,
    process_statuses,
    rank_statuses,
    table_statuses,
    version_statuses,
)
from deltasync.status.records import (
    ConsumerStatus,
    KeptStatus,
    ModelStatus,
    ProcessStatus,
    RankStatus,
    TableConsumer,
    TableStatus,
    VersionStatus,
)

_Model = Annotated[str | None, Query(description="Only this model.")]
_Last = Annotated[int, Query(ge=1, le=KEPT_CUTS, description="Maximum number of versions of each model.")]


@dataclass(frozen=True)
class DeleteStatus:
    """A pending delete; `asked_unix_ns` distinguishes it from other deletes of its model."""

    model: str
    table: str
    rows: int
    asked_unix_ns: int
    reason: str


def model_routes(models: Models, removals: Removals, answers: Answers) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=EncodedRoute)

    @router.get("/models")
    async def all_models() -> list[ModelStatus]:
        """The models of this process, and those that no process owns."""
        models.check_confirmed()
        return answers.models()

    @router.delete("/models/{name}", status_code=204)
    async def delete_model(name: str) -> None:
        """Delete a model that no rank publishes and no consumer follows. Needs role admin."""
        await removals.delete_model(name, author())

    @router.post("/models/{name}/give-up", status_code=204)
    async def give_up_model(name: str) -> None:
        """Give up a model that cannot be recovered; its trainer then publishes every row. Needs role admin."""
        await removals.give_up_model(name, author())

    @router.delete("/models/{name}/tables/{table:path}", status_code=204)
    async def delete_table(name: str, table: str) -> None:
        """Delete a table that no connected rank publishes. Needs role admin."""
        await removals.delete_table(name, table, author())

    @router.get("/tables")
    async def tables() -> list[TableStatus]:
        """The tables of this process's models."""
        models.check_confirmed()
        return [line for name in sorted(models) for line in table_statuses(models, name)]

    @router.get("/tables/{name:path}")
    async def table(name: str) -> list[TableStatus]:
        """The tables with this name in all models of this process, with the lag of consumers in them."""
        models.check_confirmed()
        every = (line for model in sorted(models) for line in table_statuses(models, model))
        lines = [line for line in every if line.table == name]
        if not lines:
            raise NotFound(f"no table {name!r}", detail=" in this process; GET /tables lists its tables")
        consumers = await answers.consumers({line.model for line in lines})
        return await asyncio.to_thread(
            lambda: [replace(line, consumers=_consumers(line, consumers)) for line in lines]
        )

    @router.get("/trainers")
    async def trainers() -> list[RankStatus]:
        """The ranks that have published this process's models since it started."""
        models.check_confirmed()
        return rank_statuses(models.coordinators)

    @router.get("/versions")
    async def versions(model: _Model = None, last: _Last = 20) -> list[VersionStatus]:
        """The last versions of this process's models since it started, newest first; at most 200 of each."""
        models.check_confirmed()
        every = [each for _, each in sorted(models.items())] if model is None else [models.model(model)]
        cuts = [cut for each in every for cut in last_cuts([each], last)]
        return await asyncio.to_thread(version_statuses, cuts)

    @router.get("/deletes")
    async def deletes() -> list[DeleteStatus]:
        """The pending deletes of this process's models, and why each is pending."""
        models.check_confirmed()
        return [_delete(pending) for pending in removals.pending_deletes()]

    @router.post("/deletes", status_code=202)
    async def delete(body: DeleteBody) -> DeleteStatus:
        """Ask a model's trainer to delete rows. Needs role admin."""
        return _delete(await removals.delete_rows(body.model, body.table, body.ids, author()))

    @router.get("/processes")
    async def processes() -> list[ProcessStatus]:
        """The processes of the service, with their addresses and models."""
        return process_statuses(models.owners, models)

    return router


def _consumers(table: TableStatus, consumers: Iterable[ConsumerStatus]) -> list[TableConsumer]:
    return [
        TableConsumer(each.consumer, each.state, lag)
        for each in consumers
        if each.model == table.model
        for lag in each.tables
        if lag.table == table.table
    ]


def _delete(pending: PendingDelete) -> DeleteStatus:
    request = pending.request
    return DeleteStatus(pending.model, request.table, len(request.ids), request.number, pending.reason)


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
