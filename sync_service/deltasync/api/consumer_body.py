"""The body of a request that describes a consumer."""

from typing import Any

from fastapi import Request

from deltasync.api.json_body import json_object, text_of
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import FIELDS, Policy
from deltasync.core.policy_fields import PolicyField

_DEFAULT = Policy().as_dict()


def _schema(field: PolicyField) -> dict[str, Any]:
    schema = field.kind.schema
    if field.default is None:
        schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}
    return {**schema, "description": field.words, "default": _DEFAULT[field.name]}


_POLICY = {
    "type": "object",
    "properties": {field.name: _schema(field) for field in FIELDS},
    "additionalProperties": False,
}


def _body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def _described(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {
        "type": "object",
        "properties": {**properties, "policy": _POLICY},
        "required": list(names),
        "additionalProperties": False,
    }


_EXAMPLE = {"top_k": 0.1, "value_type": "int8"}

# For /docs.
BODY = _body(_described("model"), {"model": "clicks", "policy": _EXAMPLE})
NEW_BODY = _body(_described("name", "model"), {"name": "predictors", "model": "clicks", "policy": _EXAMPLE})
POLICY_BODY = _body(_POLICY, _EXAMPLE)

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


async def new_consumer(request: Request) -> tuple[str, str, Policy]:
    """Name, model and policy of the consumer that a body describes; without a policy, the default one.

    Raises:
        InvalidInput: it describes none; the message says what is wrong.
    """
    described = await json_object(request, ("name", "model", "policy"))
    wanted = ConsumerOptions.described(
        text_of(described, "name"), described.get("model"), described.get("policy", {})
    )
    return wanted.name, wanted.model, wanted.policy or Policy()


async def consumer_of(name: str, request: Request) -> ConsumerOptions:
    """The consumer that a body `{"model": ..., "policy": {...}}` describes; no policy is the default one.

    Raises:
        InvalidInput: it describes none; the message says what is wrong.
    """
    described = await json_object(request, ("model", "policy"))
    return ConsumerOptions.described(name, described.get("model"), described.get("policy", {}))


async def policy_of(request: Request) -> Policy:
    """The policy that a body describes.

    Raises:
        InvalidInput: it describes none; the message says what is wrong.
    """
    return Policy.from_dict(await json_object(request, tuple(field.name for field in FIELDS)))


async def reason_of(request: Request) -> str:
    """The reason that a body `{"reason": ...}` gives; an empty body gives none.

    Raises:
        InvalidInput: it gives something else.
    """
    return text_of(await json_object(request, ("reason",), optional=True), "reason", "")
