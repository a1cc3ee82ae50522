"""Deletes of rows over HTTP. What changes something needs role admin."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from deltasync.api.caller import author
from deltasync.api.json_body import json_object
from deltasync.core.errors import InvalidInput
from deltasync.service.pending_delete import PendingDelete
from deltasync.service.service import Service

# 100,000 ids of 13 digits take 1.5 MB.
_MAX_BODY_BYTES = 2 << 20
_LARGEST_ID = 2**63 - 1

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


@dataclass(frozen=True)
class DeleteLine:
    """A delete that is asked for and not done; `asked_unix_ns` tells it from others of its model."""

    model: str
    table: str
    rows: int
    asked_unix_ns: int
    reason: str


def delete_routes(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/deletes")

    @routes.get("")
    async def deletes() -> list[DeleteLine]:
        """The deletes of this process's models that are not done, and what each waits for."""
        service.check_confirmed()
        return [_line(pending) for pending in service.pending_deletes()]

    @routes.post("", status_code=202, openapi_extra={"requestBody": _BODY})
    async def delete(request: Request) -> DeleteLine:
        """Ask a model's trainer to delete rows. Needs role admin."""
        by = author()
        return _line(await service.delete_rows(*await _wanted(request), by))

    return routes


async def _wanted(request: Request) -> tuple[str, str, list[int]]:
    """Model, table and ids that the body `{"model": ..., "table": ..., "ids": [...]}` names.

    Raises:
        InvalidInput: it names none; the message says what is wrong.
    """
    body = await json_object(request, tuple(_KEYS), _MAX_BODY_BYTES)
    model, table, ids = (body.get(key) for key in _KEYS)
    if not isinstance(model, str) or not isinstance(table, str):
        raise InvalidInput("body: expected the names of a model and a table, as texts")
    # A bool is an int to Python.
    if not isinstance(ids, list) or any(type(each) is not int or abs(each) > _LARGEST_ID for each in ids):
        raise InvalidInput("body: expected ids, a list of whole numbers of 64 bits")
    return model, table, ids


def _line(pending: PendingDelete) -> DeleteLine:
    request = pending.request
    return DeleteLine(pending.model, request.table, len(request.ids), request.number, pending.reason)
