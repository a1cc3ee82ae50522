"""The gRPC side of subscribing."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from deltasync.api.answers import answer
from deltasync.api.call_errors import abort
from deltasync.api.caller import caller
from deltasync.api.subscribe import ReplicaStream
from deltasync.core.errors import DeltasyncError, InvalidInput
from deltasync.core.events import EventKind
from deltasync.service.service import Service
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc


class SubscribeServicer(subscribe_pb2_grpc.SubscribeServiceServicer):
    """Feeds the replicas of consumers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Subscribe(  # type: ignore[override]  # gRPC takes this kind of handler, too
        self,
        request_iterator: AsyncIterator[subscribe_pb2.SubscribeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Answer one replica's stream."""
        try:
            stream = await self._open(request_iterator)
            await answer(context, stream.run(request_iterator))
        except DeltasyncError as error:
            self._service.volumes.note(error)
            await abort(context, error)

    async def Leave(
        self, request: subscribe_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> subscribe_pb2.LeaveResponse:
        """Forget a replica that has ended, and has no stream to say so."""
        self._service.registry.leave(request.consumer, request.replica, request.instance, caller().name)
        return subscribe_pb2.LeaveResponse()

    async def _open(self, requests: AsyncIterator[subscribe_pb2.SubscribeRequest]) -> ReplicaStream:
        opening = subscribe_pb2.SubscribeOpen()
        try:
            first = await anext(requests, None)
            if first is None or first.WhichOneof("message") != "open":
                raise InvalidInput("a stream begins with an open message")
            opening = first.open
            return ReplicaStream(self._service, opening)
        except DeltasyncError as error:
            named = {"consumer": opening.consumer, "replica": opening.replica}
            known = {name: value for name, value in named.items() if value}
            self._service.events.emit(EventKind.REPLICA_REFUSED, "", error, **known)
            raise
