"""The body of a request that describes a consumer."""

from typing import Any

from fastapi import Request

from deltasync.api.json_body import json_object
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import InvalidInput
from deltasync.core.policy import FIELDS, Policy
from deltasync.core.policy_fields import PolicyField

_MAX_BODY_BYTES = 64 << 10

_DEFAULT = Policy().as_dict()


def _schema(field: PolicyField) -> dict[str, Any]:
    schema = {**field.kind.schema, "description": field.words, "default": _DEFAULT[field.name]}
    if field.default is None:
        schema["type"] = [schema["type"], "null"]
    return schema


_POLICY = {
    "type": "object",
    "properties": {field.name: _schema(field) for field in FIELDS},
    "additionalProperties": False,
}

# For /docs.
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"model": {"type": "string"}, "policy": _POLICY},
                "required": ["model"],
                "additionalProperties": False,
            },
            "example": {"model": "clicks", "policy": {"top_k": 0.1, "value_type": "int8"}},
        }
    },
}

PAUSE_BODY: dict[str, Any] = {
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"reason": {"type": "string"}},
                "additionalProperties": False,
            },
            "example": {"reason": "the new model answers nonsense"},
        }
    },
}


async def consumer_of(name: str, request: Request) -> ConsumerOptions:
    """The consumer that a body `{"model": ..., "policy": {...}}` describes; no policy is the default one.

    Raises:
        InvalidInput: it describes none; the message says what is wrong.
    """
    described = await json_object(request, ("model", "policy"), _MAX_BODY_BYTES)
    return ConsumerOptions.described(name, described.get("model"), described.get("policy", {}))


async def reason_of(request: Request) -> str:
    """The reason that a body `{"reason": ...}` gives; an empty body gives none.

    Raises:
        InvalidInput: it gives something else.
    """
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return ""
    described = await json_object(request, ("reason",), _MAX_BODY_BYTES)
    reason = described.get("reason", "")
    if not isinstance(reason, str):
        raise InvalidInput("body: expected a reason, as a text")
    return reason
