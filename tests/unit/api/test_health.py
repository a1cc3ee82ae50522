"""What health checks are told, whoever else watches."""

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from deltasync.access.rights import need_of_call
from deltasync.api.grpc_server import Health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Watcher:
    """A peer that takes what it is told, or not even the first answer."""

    def __init__(self, health: Health, service: str = "", *, takes: bool = True) -> None:
        self._takes, self._told = takes, asyncio.Queue[int]()
        self.task = asyncio.create_task(
            health.Watch(health_pb2.HealthCheckRequest(service=service), self._context)
        )

    @property
    def _context(self) -> Any:
        return self

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        if not self._takes:
            await asyncio.Event().wait()
        self._told.put_nowait(answer.status)

    async def next(self) -> int:
        return await asyncio.wait_for(self._told.get(), 10)


@pytest.mark.parametrize(("service", "answers"), [("", [NOT_SERVING, SERVING, NOT_SERVING]), ("other", [UNKNOWN])])
def test_who_takes_no_answer_keeps_nobody_from_theirs(service: str, answers: list[int]) -> None:
    async def watch() -> list[int]:
        health = Health(("one",))
        watchers = [Watcher(health, service, takes=False), Watcher(health, service)]
        told = [await watchers[1].next()]
        for serving in (True, False):
            health.set(serving=serving)
            if len(answers) > 1:
                told.append(await watchers[1].next())
        for each in watchers:
            each.task.cancel()
        return told

    assert asyncio.run(watch()) == answers


@pytest.mark.parametrize("call", ["Check", "Watch"])
def test_a_name_that_is_asked_for_is_bounded(call: str) -> None:
    request = health_pb2.HealthCheckRequest(service="name")
    assert need_of_call(f"/grpc.health.v1.Health/{call}").name(request) == "name"
