"""The gRPC side of managing consumers and deleting rows."""

from typing import Any

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from deltasync.api.call_errors import abort
from deltasync.api.token import check_token
from deltasync.consumers.consumer import Consumer
from deltasync.core.errors import DeltasyncError
from deltasync.service.service import PendingDelete, Service
from deltasync.v1 import admin_pb2, admin_pb2_grpc
from deltasync.wire.messages import policy_from_message, policy_to_message


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Manages consumers, and has rows deleted; what changes something needs the admin token."""

    def __init__(self, service: Service, token: str | None) -> None:
        self._service = service
        self._token = token

    async def CreateConsumer(
        self, request: admin_pb2.CreateConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.CreateConsumerResponse:
        """Make a consumer."""
        try:
            self._check_token(context)
            wanted = request.consumer
            policy = policy_from_message(wanted.policy)
            consumer = await self._service.create_consumer(wanted.name, wanted.model, policy)
        except DeltasyncError as error:
            await abort(context, error)
        return admin_pb2.CreateConsumerResponse(consumer=_message(consumer))

    async def UpdateConsumer(
        self, request: admin_pb2.UpdateConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.UpdateConsumerResponse:
        """Give a consumer another policy."""
        try:
            self._check_token(context)
            consumer = await self._service.update_consumer(request.name, policy_from_message(request.policy))
        except DeltasyncError as error:
            await abort(context, error)
        return admin_pb2.UpdateConsumerResponse(consumer=_message(consumer))

    async def DeleteConsumer(
        self, request: admin_pb2.DeleteConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteConsumerResponse:
        """Forget a consumer."""
        try:
            self._check_token(context)
            await self._service.delete_consumer(request.name)
        except DeltasyncError as error:
            await abort(context, error)
        return admin_pb2.DeleteConsumerResponse()

    async def ListConsumers(
        self, request: admin_pb2.ListConsumersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListConsumersResponse:
        """List all consumers."""
        consumers = self._service.registry.consumers
        return admin_pb2.ListConsumersResponse(consumers=[_message(consumers[name]) for name in sorted(consumers)])

    async def DeleteRows(
        self, request: admin_pb2.DeleteRowsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteRowsResponse:
        """Ask the trainer of a model to delete rows."""
        try:
            self._check_token(context)
            pending = await self._service.delete_rows(request.model, request.table, request.ids)
        except DeltasyncError as error:
            await abort(context, error)
        return admin_pb2.DeleteRowsResponse(pending=_pending(pending))

    async def ListPendingDeletes(
        self, request: admin_pb2.ListPendingDeletesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListPendingDeletesResponse:
        """List the deletes that are not done."""
        return admin_pb2.ListPendingDeletesResponse(pending=map(_pending, self._service.pending_deletes()))

    def _check_token(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        check_token(self._token, dict(context.invocation_metadata() or ()))


def _message(consumer: Consumer) -> admin_pb2.Consumer:
    policy = policy_to_message(consumer.policy)
    return admin_pb2.Consumer(
        name=consumer.name, model=consumer.model, created=_timestamp(consumer.created_unix_ns), policy=policy
    )


def _pending(pending: PendingDelete) -> admin_pb2.PendingDelete:
    request = pending.request
    return admin_pb2.PendingDelete(
        number=request.number,
        model=pending.model,
        table=request.table,
        rows=len(request.ids),
        asked=_timestamp(request.number),
        reason=pending.reason,
    )


def _timestamp(unix_ns: int) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(unix_ns)
    return timestamp
