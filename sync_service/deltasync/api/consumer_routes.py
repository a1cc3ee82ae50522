"""Consumers over HTTP: list, create, change, pause and delete them."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from deltasync.access.roles import Role, author, check_may
from deltasync.api.operation_routes import Collaborators
from deltasync.api.requests import json_object, text_body, text_of
from deltasync.base.arguments import number_of
from deltasync.base.errors import InvalidInput, NotOwner
from deltasync.cluster.owners import Owners
from deltasync.consumers.consumer import Consumer, ConsumerOptions
from deltasync.consumers.follow import BACK, STAY, Distance
from deltasync.consumers.serving_history import HistoryPage
from deltasync.core.policy import FIELDS, Policy, PolicyField


@dataclass(frozen=True)
class ConsumerLine:
    """A consumer in a list.

    `paused` has the time, author and reason of a pause, and is empty without one. `follows` has the kept version
    that it follows, the time and the author; it is empty for the newest version. `objects` has the time, author
    and reason of its objection, and is empty without one.
    """

    consumer: str
    model: str
    replicas: int
    connected: int
    policy: dict[str, Any]
    paused: str
    follows: str
    objects: str


_VERSION = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "version": {
                            "type": "string",
                            "description": "Name or number of a kept version, or `live`; with `after`, the first.",
                        },
                        "after": {"type": "string", "description": "A consumer to follow at a distance."},
                        "behind_seconds": {"type": "number", "minimum": 0, "description": "The distance."},
                        "on_objection": {"enum": [STAY, BACK], "default": STAY},
                    },
                    "additionalProperties": False,
                },
                "examples": {
                    "version": {"value": {"version": "before-launch"}},
                    "distance": {"value": {"after": "canary", "behind_seconds": 1200}},
                },
            }
        },
    }
}
_REASON = text_body("reason", "What is wrong with the version that it serves.", "its AUC fell", required=True)
_Since = Annotated[float, Query(ge=0, le=1e9, description="Only lines of the last seconds.")]
_Last = Annotated[int, Query(ge=1, le=100_000, description="Maximum number of lines; the newest ones count.")]
_From = Annotated[
    int | None,
    Query(ge=0, lt=2**63, description="The next page, instead of `since_seconds`: `next_ns` of this one."),
]


_MADE: dict[int | str, dict[str, Any]] = {201: {"model": ConsumerLine, "description": "The consumer was created."}}


def consumer_routes(on: Collaborators) -> APIRouter:
    """Routes for consumers, their policies, pauses and replicas, and for what they follow and served."""
    models, registry, consumers, following = on.models, on.registry, on.consumers, on.following
    routes = APIRouter(prefix="/consumers")

    @routes.get("", name="consumers")
    async def all_consumers() -> list[ConsumerLine]:
        """The consumers of the models that this process owns."""
        models.check_confirmed()
        every = sorted(registry.consumers.items())
        return [_line(each) for _, each in every if _is_owned(models.owners, each.model)]

    @routes.get("/{name}")
    async def consumer(name: str) -> ConsumerLine:
        """One consumer."""
        return _line(consumers.get(name))

    @routes.post("", openapi_extra={"requestBody": NEW_BODY}, responses=_MADE)
    async def create(request: Request, response: Response) -> ConsumerLine:
        """Create a consumer. Answers 409 if it exists with another model or policy. Needs role admin."""
        by = author()
        name, model, policy = await new_consumer(request)
        response.status_code = 200 if name in registry.consumers else 201
        return _line(await consumers.create(name, model, policy, by))

    @routes.put("/{name}", openapi_extra={"requestBody": BODY}, responses=_MADE)
    async def put(name: str, request: Request, response: Response) -> ConsumerLine:
        """Create a consumer, or give an existing one this policy. Needs role admin."""
        by = author()
        options = await consumer_of(name, request)
        response.status_code = 200 if name in registry.consumers else 201
        return _line(await consumers.ensure(options, by))

    @routes.put("/{name}/policy", openapi_extra={"requestBody": POLICY_BODY})
    async def update(name: str, request: Request) -> ConsumerLine:
        """Replace the whole policy of a consumer. Its replicas keep their offsets. Needs role admin."""
        by = author()
        return _line(await consumers.update(name, await policy_of(request), by))

    @routes.delete("/{name}", status_code=204)
    async def delete(name: str) -> None:
        """Delete a consumer and its offsets. Needs role admin."""
        await consumers.delete(name, author())

    @routes.put("/{name}/pause", openapi_extra={"requestBody": PAUSE_BODY})
    async def pause(name: str, request: Request) -> ConsumerLine:
        """Pause a consumer: its replicas get no new rows. Needs role admin."""
        by = author()
        return _line(await on.brake.pull(name, await reason_of(request), by))

    @routes.delete("/{name}/pause")
    async def resume(name: str) -> ConsumerLine:
        """Resume a paused consumer. Its replicas get the current rows. Needs role admin."""
        return _line(await on.brake.release(name, author()))

    @routes.put("/{name}/version", openapi_extra=_VERSION)
    async def follow(name: str, request: Request) -> ConsumerLine:
        """Let a consumer follow a kept version, "live", or another consumer at a distance. Needs role admin."""
        by, body = author(), await json_object(request, ("version", "after", "behind_seconds", "on_objection"))
        if "after" not in body and body.keys() <= {"version"}:
            return _line(await following.follow(name, text_of(body, "version"), by))
        distance = Distance(text_of(body, "after"), _seconds_of(body), text_of(body, "on_objection", STAY))
        return _line(await following.follow_consumer(name, distance, text_of(body, "version", ""), by))

    @routes.post("/{name}/object", openapi_extra=_REASON)
    async def raise_objection(name: str, request: Request) -> ConsumerLine:
        """Raise an objection to what a consumer serves. Needs role subscribe for this consumer."""
        check_may(Role.SUBSCRIBE, name)
        reason = text_of(await json_object(request, ("reason",)), "reason")
        return _line(await following.object(name, reason, author()))

    @routes.delete("/{name}/object")
    async def withdraw_objection(name: str) -> ConsumerLine:
        """Withdraw the objection of a consumer. Needs role admin."""
        return _line(await following.withdraw(name, author()))

    @routes.get("/{name}/history")
    async def history(
        name: str, since_seconds: _Since = 3600.0, last: _Last = 1000, from_ns: _From = None
    ) -> HistoryPage:
        """The history of a consumer, in pages: which version each replica served, by time, oldest first."""
        return await on.histories.of(name, since_seconds, last, from_ns)

    @routes.delete("/{name}/replicas/{replica}", status_code=204)
    async def forget_replica(name: str, replica: str) -> None:
        """Forget a replica that is away; the lag no longer includes it. Needs role admin."""
        await on.removals.forget_replica(name, replica, author())

    return routes


def _line(consumer: Consumer) -> ConsumerLine:
    fleet = consumer.fleet
    connected = sum(replica.stream is not None for replica in fleet)
    policy = consumer.policy.as_dict()
    paused = consumer.pause.words if consumer.pause else ""
    follows, objects = consumer.follows_words, consumer.objects_words
    return ConsumerLine(consumer.name, consumer.model, len(fleet), connected, policy, paused, follows, objects)


def _seconds_of(body: dict[str, Any]) -> float:
    seconds = number_of("body: behind_seconds", body.get("behind_seconds"))
    if not math.isfinite(seconds):
        raise InvalidInput(f"body: behind_seconds {seconds}: expected a finite number")
    return seconds


def _is_owned(owners: Owners, model: str) -> bool:
    try:
        owners.check(model)
    except NotOwner:
        return False
    return True


async def new_consumer(request: Request) -> tuple[str, str, Policy]:
    """Parse name, model and policy of a consumer from a body; the policy is optional.

    Raises:
        InvalidInput: the body is wrong.
    """
    described = await json_object(request, ("name", "model", "policy"))
    options = ConsumerOptions.described(
        text_of(described, "name"), described.get("model"), described.get("policy", {})
    )
    return options.name, options.model, options.policy or Policy()


async def consumer_of(name: str, request: Request) -> ConsumerOptions:
    """Parse a consumer from a body `{"model": ..., "policy": {...}}`; the policy is optional.

    Raises:
        InvalidInput: the body is wrong.
    """
    described = await json_object(request, ("model", "policy"))
    return ConsumerOptions.described(name, described.get("model"), described.get("policy", {}))


async def policy_of(request: Request) -> Policy:
    """Parse a policy from a body.

    Raises:
        InvalidInput: the body is wrong.
    """
    return Policy.from_dict(await json_object(request, tuple(field.name for field in FIELDS)))


async def reason_of(request: Request) -> str:
    """Parse the reason from a body `{"reason": ...}`; empty for an empty body.

    Raises:
        InvalidInput: the body is wrong.
    """
    return text_of(await json_object(request, ("reason",), optional=True), "reason", "")


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
