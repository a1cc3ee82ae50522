"""The tables of all models over HTTP."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import APIRouter

from deltasync.core.errors import NotFound
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.lag import ConsumerLag, TableLag


@dataclass(frozen=True)
class TableLine:
    """A table, in a list.

    `bytes` are those of its values. `ranks_differ` says that ranks of the trainer have different rows of it, as of
    a buffer: those of the first are published. `refused` says why the last cut was, if it was for rows of it.
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
    """How far a consumer is behind in a table."""

    consumer: str
    state: str
    lag: TableLag


@dataclass(frozen=True)
class TableDetail:
    """A table of a model, and the consumers that follow it."""

    table: TableLine
    consumers: list[FollowedTable]


def table_routes(service: Service, answers: Answers) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/tables")
    async def tables() -> list[TableLine]:
        """The tables of this process's models."""
        service.check_confirmed()
        return [line for name in sorted(service.models) for line in _lines(service, name)]

    @router.get("/tables/{name:path}")
    async def table(name: str) -> list[TableDetail]:
        """The tables of that name, one of each of this process's models that has one, and how far consumers are
        behind in them.
        """
        service.check_confirmed()
        lines = [line for model in sorted(service.models) for line in _lines(service, model, name)]
        if not lines:
            raise NotFound(f"no table {name!r}", detail=" in this process; GET /tables names its tables")
        lags = await answers.lags({line.model for line in lines})
        return await asyncio.to_thread(lambda: [TableDetail(line, _followed(line, lags)) for line in lines])

    return router


def _followed(line: TableLine, lags: Iterable[ConsumerLag]) -> list[FollowedTable]:
    return [
        FollowedTable(lag.consumer, lag.state, each)
        for lag in lags
        if lag.model == line.model
        for each in lag.tables
        if each.table == line.table
    ]


def _lines(service: Service, name: str, table: str | None = None) -> Iterable[TableLine]:
    """The tables of a model, or the one of a name."""
    model, differing = service.models[name], service.coordinators[name].differing
    sealer = service.coordinators[name].sealer
    reasons = [sealer.refusal.reason if sealer.refusal else "", sealer.quarantine]
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
