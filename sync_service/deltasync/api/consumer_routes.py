"""Consumers over HTTP. What changes something needs role admin."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from deltasync.api.caller import author
from deltasync.api.consumer_body import (
    BODY,
    NEW_BODY,
    PAUSE_BODY,
    POLICY_BODY,
    consumer_of,
    new_consumer,
    policy_of,
    reason_of,
)
from deltasync.consumers.consumer import Consumer
from deltasync.core.errors import NotOwner
from deltasync.service.brake import Brake
from deltasync.service.removals import Removals
from deltasync.service.service import Service


@dataclass(frozen=True)
class ConsumerLine:
    """A consumer, in a list; `paused` says since when, by whom and why, if it is."""

    consumer: str
    model: str
    replicas: int
    connected: int
    policy: dict[str, Any]
    paused: str


_MADE: dict[int | str, dict[str, Any]] = {201: {"model": ConsumerLine, "description": "It was made."}}


def consumer_routes(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/consumers")

    @routes.get("")
    async def consumers() -> list[ConsumerLine]:
        """The consumers of the models that this process owns."""
        service.check_confirmed()
        consumers = sorted(service.registry.consumers.items())
        return [_line(each) for _, each in consumers if _is_owned(service, each.model)]

    @routes.get("/{name}")
    async def consumer(name: str) -> ConsumerLine:
        """One consumer."""
        return _line(service.consumer(name))

    @routes.post("", openapi_extra={"requestBody": NEW_BODY}, responses=_MADE)
    async def create(request: Request, response: Response) -> ConsumerLine:
        """Make a consumer. One that is there already stays as it is: 409 where it has another model or policy.
        Needs role admin.
        """
        by = author()
        name, model, policy = await new_consumer(request)
        response.status_code = 200 if name in service.registry.consumers else 201
        return _line(await service.create_consumer(name, model, policy, by))

    @routes.put("/{name}", openapi_extra={"requestBody": BODY}, responses=_MADE)
    async def put(name: str, request: Request, response: Response) -> ConsumerLine:
        """Make a consumer, or give the one there is this policy. Needs role admin."""
        by = author()
        wanted = await consumer_of(name, request)
        response.status_code = 200 if name in service.registry.consumers else 201
        return _line(await service.ensure_consumer(wanted, by))

    @routes.put("/{name}/policy", openapi_extra={"requestBody": POLICY_BODY})
    async def update(name: str, request: Request) -> ConsumerLine:
        """Replace a consumer's policy as a whole; its replicas keep their place. Needs role admin."""
        by = author()
        return _line(await service.update_consumer(name, await policy_of(request), by))

    @routes.delete("/{name}", status_code=204)
    async def delete(name: str) -> None:
        """Forget a consumer and its offsets. Needs role admin."""
        await service.delete_consumer(name, author())

    @routes.put("/{name}/pause", openapi_extra={"requestBody": PAUSE_BODY})
    async def pause(name: str, request: Request) -> ConsumerLine:
        """Hold its replicas at what they have, whatever is published. Needs role admin."""
        by = author()
        return _line(await Brake(service).pull(name, await reason_of(request), by))

    @routes.delete("/{name}/pause")
    async def resume(name: str) -> ConsumerLine:
        """Let a paused consumer go on, with all that its replicas lack. Needs role admin."""
        return _line(await Brake(service).release(name, author()))

    @routes.delete("/{name}/replicas/{replica}", status_code=204)
    async def forget_replica(name: str, replica: str) -> None:
        """Forget a replica that is away: no lag counts it any more. Needs role admin."""
        await Removals(service).forget_replica(name, replica, author())

    return routes


def _line(consumer: Consumer) -> ConsumerLine:
    fleet = consumer.fleet
    connected = sum(replica.stream is not None for replica in fleet)
    policy = consumer.policy.as_dict()
    paused = consumer.pause.words if consumer.pause else ""
    return ConsumerLine(consumer.name, consumer.model, len(fleet), connected, policy, paused)


def _is_owned(service: Service, model: str) -> bool:
    try:
        service.owners.check(model)
    except NotOwner:
        return False
    return True
