"""What health checks are told."""

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltasync.core.signals import Signal

_Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Tells whether services serve: all of them, or none.

    In place of gRPC's own, which has all who watch wait for each other: there one that takes no answer keeps the
    others from theirs, and the process from its end.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Tell that they do not serve, until told otherwise."""
        self._services = frozenset({"", *services})
        self._serving = False
        self._signal = Signal()

    def note(self, *, serving: bool) -> None:
        """Tell from now on whether they serve."""
        self._serving = serving
        self._signal.wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Tell it once."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._answer(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Tell it now, and whenever it changes."""
        told = None
        while True:
            answer = self._answer(request.service)
            if answer == told:
                await self._signal.changed()
                continue
            told = answer
            await context.write(answer)

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        answer = health_pb2.HealthCheckResponse()
        if service not in self._services:
            answer.status = answer.SERVICE_UNKNOWN
        else:
            answer.status = answer.SERVING if self._serving else answer.NOT_SERVING
        return answer
