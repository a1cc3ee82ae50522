"""Consumers over HTTP. What changes something needs the admin token."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from deltasync.api.consumer_body import BODY, PAUSE_BODY, consumer_of, reason_of
from deltasync.api.request_author import author_of
from deltasync.consumers.consumer import Consumer
from deltasync.service.brake import Brake
from deltasync.service.removals import Removals
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.lag import ConsumerLag


@dataclass(frozen=True)
class ConsumerLine:
    """A consumer, in a list; `paused` says since when, by whom and why, if it is."""

    consumer: str
    model: str
    replicas: int
    connected: int
    policy: dict[str, Any]
    paused: str


def consumer_routes(service: Service, answers: Answers, token: str | None) -> APIRouter:
    """The routes; `token` is the admin token."""
    routes = APIRouter(prefix="/consumers")

    @routes.get("/{name}/lag")
    async def lag(name: str) -> ConsumerLag:
        """How far a consumer is behind its model: in versions, rows, bytes, seconds and unsent norm."""
        return await answers.lag(name)

    @routes.get("")
    async def consumers() -> list[ConsumerLine]:
        """All consumers."""
        return [_line(consumer) for _, consumer in sorted(service.registry.consumers.items())]

    @routes.put("/{name}", openapi_extra={"requestBody": BODY})
    async def put(name: str, request: Request, response: Response) -> ConsumerLine:
        """Make a consumer, or give the one there is this policy. Needs the admin token."""
        by = author_of(token, request)
        wanted = await consumer_of(name, request)
        response.status_code = 200 if name in service.registry.consumers else 201
        return _line(await service.ensure_consumer(wanted, by))

    @routes.delete("/{name}", status_code=204)
    async def delete(name: str, request: Request) -> None:
        """Forget a consumer and its offsets. Needs the admin token."""
        await service.delete_consumer(name, author_of(token, request))

    @routes.put("/{name}/pause", openapi_extra={"requestBody": PAUSE_BODY})
    async def pause(name: str, request: Request) -> ConsumerLine:
        """Hold its replicas at what they have, whatever is published. Needs the admin token."""
        by = author_of(token, request)
        return _line(await Brake(service).pull(name, await reason_of(request), by))

    @routes.delete("/{name}/pause")
    async def resume(name: str, request: Request) -> ConsumerLine:
        """Let a paused consumer go on, with all that its replicas lack. Needs the admin token."""
        return _line(await Brake(service).release(name, author_of(token, request)))

    @routes.delete("/{name}/replicas/{replica}", status_code=204)
    async def forget_replica(name: str, replica: str, request: Request) -> None:
        """Forget a replica that is away: no lag counts it any more. Needs the admin token."""
        await Removals(service).forget_replica(name, replica, author_of(token, request))

    return routes


def _line(consumer: Consumer) -> ConsumerLine:
    connected = sum(replica.stream is not None for replica in consumer.replicas.values())
    policy = consumer.policy.as_dict()
    paused = consumer.pause.words if consumer.pause else ""
    return ConsumerLine(consumer.name, consumer.model, len(consumer.replicas), connected, policy, paused)
