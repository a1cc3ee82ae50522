"""Deletes of rows over HTTP. What changes something needs the admin token."""

from dataclasses import dataclass

from fastapi import APIRouter, Request

from deltasync.api.token import check_token
from deltasync.service.service import PendingDelete, Service


@dataclass(frozen=True)
class DeleteBody:
    """Rows to delete: global ids of rows of an embedding table, in any order."""

    model: str
    table: str
    ids: list[int]


@dataclass(frozen=True)
class DeleteLine:
    """A delete that is asked for and not done; `asked_unix_ns` tells it from others of its model."""

    model: str
    table: str
    rows: int
    asked_unix_ns: int
    reason: str


def delete_routes(service: Service, token: str | None) -> APIRouter:
    """The routes; `token` is the admin token."""
    routes = APIRouter(prefix="/deletes")

    @routes.get("")
    async def deletes() -> list[DeleteLine]:
        """The deletes that are not done, and what each waits for."""
        return [_line(pending) for pending in service.pending_deletes()]

    @routes.post("", status_code=202)
    async def delete(body: DeleteBody, request: Request) -> DeleteLine:
        """Ask a model's trainer to delete rows. Needs the admin token."""
        check_token(token, request.headers)
        return _line(await service.delete_rows(body.model, body.table, body.ids))

    return routes


def _line(pending: PendingDelete) -> DeleteLine:
    request = pending.request
    return DeleteLine(pending.model, request.table, len(request.ids), request.number, pending.reason)
