"""The body of a request that describes a consumer."""

import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

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


async def consumer_of(name: str, request: Request) -> ConsumerOptions:
    """The consumer that a body `{"model": ..., "policy": {...}}` describes; no policy is the default one.

    Raises:
        InvalidInput: it describes none; the message says what is wrong.
    """
    described = _parsed(await _body(request))
    if not isinstance(described, dict):
        raise InvalidInput("body: expected an object")
    if unknown := sorted(described.keys() - {"model", "policy"}):
        raise InvalidInput(f"body: unknown key {unknown[0]!r}; keys: model, policy")
    return ConsumerOptions.described(name, described.get("model"), described.get("policy", {}))


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise InvalidInput(f"body: more than {_MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise InvalidInput("body: it ends in the middle") from error
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"body: no JSON: {error}") from error
