"""From which level on the process writes messages, over HTTP."""

from typing import Any

from fastapi import APIRouter, Request

from deltasync.api.caller import author
from deltasync.api.json_body import json_object
from deltasync.core.errors import InvalidInput
from deltasync.core.events import EventKind
from deltasync.core.logs import LEVELS, levels, set_levels
from deltasync.service.service import Service

_MAX_BODY_BYTES = 4 << 10
_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"logger": {"type": "string"}, "level": {"enum": list(LEVELS)}},
                "required": ["level"],
                "additionalProperties": False,
            },
            "example": {"logger": "deltasync.api", "level": "debug"},
        }
    },
}


def log_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/log-levels")
    async def show() -> dict[str, str]:
        """The levels of those of this process's loggers that have one of their own."""
        return levels()

    @router.put("/log-levels", openapi_extra={"requestBody": _BODY})
    async def change(request: Request) -> dict[str, str]:
        """Write messages of this process from another level on, until it ends; of one logger, or of all.

        Needs role admin.
        """
        by = author()
        said = await json_object(request, ("logger", "level"), _MAX_BODY_BYTES)
        logger, level = said.get("logger", "deltasync"), said.get("level")
        if not isinstance(level, str) or not isinstance(logger, str) or "," in f"{logger}{level}":
            raise InvalidInput(f"body: expected a level, one of {', '.join(LEVELS)}, and the name of a logger")
        set_levels(f"{logger}={level}")
        service.events.emit(EventKind.LOG_LEVEL_CHANGED, f"from {level} on", name=logger, by=by)
        return levels()

    return router
