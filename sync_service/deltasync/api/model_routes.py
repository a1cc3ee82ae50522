"""Models, tables, trainers and pending deletes over HTTP."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from deltasync.access.roles import author
from deltasync.api.requests import json_object
from deltasync.base.clock import steady_ns
from deltasync.base.errors import InvalidInput, NotFound
from deltasync.core.cut_times import KEPT_CUTS
from deltasync.cuts.coordinator import CutCoordinator, CutRefusal
from deltasync.model.model import Model
from deltasync.service.models import Models
from deltasync.service.operators import PendingDelete, Removals
from deltasync.status.answers import Answers
from deltasync.status.lag import ConsumerLag, TableLag
from deltasync.status.overview import TrainerLine, trainer_lines
from deltasync.status.versions import VersionLine, last_cuts, version_lines


@dataclass(frozen=True)
class RankLine:
    """One rank of the run that publishes a model.

    Attributes:
        rank: its number.
        connected: whether it is connected.
        finished: whether it said goodbye. A rank that is neither connected nor finished is lost.
        since_seconds: seconds since it connected or left.
        left: why its last stream ended; empty while connected.
    """

    rank: int
    connected: bool
    finished: bool
    since_seconds: float
    left: str


@dataclass(frozen=True)
class RefusalLine:
    """The last time that the service refused a cut because of its rows, and why."""

    seconds_ago: float
    reason: str


@dataclass(frozen=True)
class ModelLine:
    """A model, its newest version, and its run with the ranks that connected since the service started.

    `run` is empty until the first rank connects.
    """

    model: str
    head: int
    run: str
    ranks: list[RankLine]
    refused: RefusalLine | None
    quarantine: str


def model_routes(models: Models, removals: Removals) -> APIRouter:
    """Routes for models."""
    router = APIRouter()

    @router.get("/models", name="models")
    async def all_models() -> list[ModelLine]:
        """The models of this process, and the runs that publish them."""
        models.check_confirmed()
        return [_model_line(each, models.coordinators.get(name)) for name, each in sorted(models.items())]

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

    return router


def _model_line(model: Model, coordinator: CutCoordinator | None) -> ModelLine:
    head = model.seals.newest_version
    if coordinator is None:
        return ModelLine(model.name, head, run="", ranks=[], refused=None, quarantine="")
    now = steady_ns()
    ranks = [
        RankLine(rank, not each.ended, each.finished, round((now - each.since_ns) / 1e9, 3), each.left)
        for rank, each in sorted(coordinator.sessions.items())
    ]
    return ModelLine(
        model.name, head, coordinator.run_id, ranks, _refused(coordinator.refusal), coordinator.quarantine
    )


def _refused(refusal: CutRefusal | None) -> RefusalLine | None:
    if refusal is None:
        return None
    return RefusalLine(round((steady_ns() - refusal.at_ns) / 1e9, 3), refusal.reason)


@dataclass(frozen=True)
class TableLine:
    """A table in a list.

    `bytes` counts its values. `ranks_differ` is true if ranks of the trainer have different rows, for example in a
    buffer; the service then keeps the first rank's. `refused` is the reason if the last cut was refused for rows
    of this table.
    """

    model: str
    table: str
    rows: int
    dim: int
    dtype: str
    bytes: int
    head: int
    kind: str
    ranks_differ: bool
    refused: str


@dataclass(frozen=True)
class FollowedTable:
    """The lag of a consumer in a table."""

    consumer: str
    state: str
    lag: TableLag


@dataclass(frozen=True)
class TableDetail:
    """A table of a model, and the consumers that follow it."""

    table: TableLine
    consumers: list[FollowedTable]


def table_routes(models: Models, answers: Answers) -> APIRouter:
    """Routes for tables."""
    router = APIRouter()

    @router.get("/tables")
    async def tables() -> list[TableLine]:
        """The tables of this process's models."""
        models.check_confirmed()
        return [line for name in sorted(models) for line in _lines(models, name)]

    @router.get("/tables/{name:path}")
    async def table(name: str) -> list[TableDetail]:
        """The tables with this name in all models of this process, and the lag of consumers in them."""
        models.check_confirmed()
        lines = [line for model in sorted(models) for line in _lines(models, model, name)]
        if not lines:
            raise NotFound(f"no table {name!r}", detail=" in this process; GET /tables lists its tables")
        lags = await answers.lags({line.model for line in lines})
        return await asyncio.to_thread(lambda: [TableDetail(line, _followed(line, lags)) for line in lines])

    return router


def _lines(models: Models, name: str, table: str | None = None) -> Iterable[TableLine]:
    """The tables of a model, or only the one of that name."""
    model, coordinator = models[name], models.coordinators.get(name)
    differing, reasons = set[str](), list[str]()
    if coordinator:
        differing, refusal = set(coordinator.differing), coordinator.refusal
        reasons = [refusal.reason if refusal else "", coordinator.quarantine]
    return [
        TableLine(
            model=name,
            table=t.name,
            rows=t.rows,
            dim=t.dim,
            dtype=str(t.dtype),
            bytes=t.nbytes,
            head=model.seals.newest_version,
            kind=t.kind.value,
            ranks_differ=t.name in differing,
            refused=next((reason for reason in reasons if repr(t.name) in reason), ""),
        )
        for t in (each.spec for each in model.tables)
        if table in (None, t.name)
    ]


def _followed(line: TableLine, lags: Iterable[ConsumerLag]) -> list[FollowedTable]:
    return [
        FollowedTable(lag.consumer, lag.state, each)
        for lag in lags
        if lag.model == line.model
        for each in lag.tables
        if each.table == line.table
    ]


_Model = Annotated[str | None, Query(description="Only this model.")]


_Last = Annotated[int, Query(ge=1, le=KEPT_CUTS, description="Maximum number of versions of each model.")]


def trainer_routes(models: Models) -> APIRouter:
    """Routes for trainers and versions."""
    router = APIRouter()

    @router.get("/trainers")
    async def trainers() -> list[TrainerLine]:
        """The ranks that have published this process's models since it started."""
        models.check_confirmed()
        return trainer_lines(models.coordinators)

    @router.get("/versions")
    async def versions(model: _Model = None, last: _Last = 20) -> list[VersionLine]:
        """The last versions of this process's models since it started, newest first; at most 200 of each.

        `seconds` has the duration of each phase: gather (collecting the changed rows), send, seal (checks, and
        waiting for the previous version), log (until durable), apply, release (until sent) and ack.
        """
        models.check_confirmed()
        every = [each for _, each in sorted(models.items())] if model is None else [models.model(model)]
        cuts = [cut for each in every for cut in last_cuts([each], last)]
        return await asyncio.to_thread(version_lines, cuts)

    return router


@dataclass(frozen=True)
class DeleteLine:
    """A pending delete; `asked_unix_ns` distinguishes it from other deletes of its model."""

    model: str
    table: str
    rows: int
    asked_unix_ns: int
    reason: str


def delete_routes(models: Models, removals: Removals) -> APIRouter:
    """Routes for deletes of rows."""
    routes = APIRouter(prefix="/deletes")

    @routes.get("")
    async def deletes() -> list[DeleteLine]:
        """The pending deletes of this process's models, and why each is pending."""
        models.check_confirmed()
        return [_delete_line(pending) for pending in removals.pending_deletes()]

    @routes.post("", status_code=202, openapi_extra={"requestBody": _BODY})
    async def delete(request: Request) -> DeleteLine:
        """Ask a model's trainer to delete rows. Needs role admin."""
        by = author()
        return _delete_line(await removals.delete_rows(*await _rows_of(request), by))

    return routes


async def _rows_of(request: Request) -> tuple[str, str, Any]:
    """Parse a body `{"model": ..., "table": ..., "ids": [...]}`.

    Raises:
        InvalidInput: the body is wrong.
    """
    body = await json_object(request, tuple(_KEYS), _MAX_BODY_BYTES)
    model, table, ids = (body.get(key) for key in _KEYS)
    if not isinstance(model, str) or not isinstance(table, str):
        raise InvalidInput("body: expected the names of a model and a table, as strings")
    if not isinstance(ids, list):
        raise InvalidInput("body: expected ids, a list of integers")
    return model, table, ids


def _delete_line(pending: PendingDelete) -> DeleteLine:
    request = pending.request
    return DeleteLine(pending.model, request.table, len(request.ids), request.number, pending.reason)


# 100,000 ids of 13 digits take 1.5 MB.
_MAX_BODY_BYTES = 2 << 20


_KEYS = {
    "model": {"type": "string"},
    "table": {"type": "string"},
    "ids": {"type": "array", "items": {"type": "integer"}, "description": "Global row ids, in any order."},
}


# For /docs.
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": _KEYS,
                "required": list(_KEYS),
                "additionalProperties": False,
            },
            "example": {"model": "clicks", "table": "sparse.embedding_bags.user", "ids": [4711]},
        }
    },
}
