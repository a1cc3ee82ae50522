"""Consumers over HTTP. What changes something needs the admin token."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from deltasync.api.consumer_body import BODY, consumer_of
from deltasync.api.token import check_token
from deltasync.consumers.consumer import Consumer
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.lag import ConsumerLag


@dataclass(frozen=True)
class ConsumerLine:
    """A consumer, in a list."""

    consumer: str
    model: str
    replicas: int
    connected: int
    policy: dict[str, Any]


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
        check_token(token, request.headers)
        wanted = await consumer_of(name, request)
        response.status_code = 200 if name in service.registry.consumers else 201
        return _line(await service.ensure_consumer(wanted))

    @routes.delete("/{name}", status_code=204)
    async def delete(name: str, request: Request) -> None:
        """Forget a consumer and its offsets. Needs the admin token."""
        check_token(token, request.headers)
        await service.delete_consumer(name)

    return routes


def _line(consumer: Consumer) -> ConsumerLine:
    connected = sum(replica.stream is not None for replica in consumer.replicas.values())
    policy = consumer.policy.as_dict()
    return ConsumerLine(consumer.name, consumer.model, len(consumer.replicas), connected, policy)
