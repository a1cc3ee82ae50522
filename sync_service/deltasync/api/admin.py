"""The gRPC side of managing consumers, deleting rows and making backups."""

from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from deltasync.api.caller import author
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.pause import Pause
from deltasync.core.build import built_version
from deltasync.service.backups import Backups
from deltasync.service.brake import Brake
from deltasync.service.inspection import InspectedTable, inspect
from deltasync.service.pending_delete import PendingDelete
from deltasync.service.processes import drain_process
from deltasync.service.removals import Removals
from deltasync.service.service import Service
from deltasync.service.snapshots import snapshots_of
from deltasync.service.verification import verify_replica
from deltasync.v1 import admin_pb2, admin_pb2_grpc
from deltasync.wire.messages import policy_from_message, policy_to_message
from deltasync.wire.verified_messages import verified_to_message


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Manages consumers, has rows deleted, and makes backups."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._removals, self._brake = Removals(service), Brake(service)
        self._backups = Backups(service)

    async def Describe(
        self, request: admin_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DescribeResponse:
        """Say which service answers."""
        return admin_pb2.DescribeResponse(http=self._service.owners.me.http, version=built_version())

    async def CreateConsumer(
        self, request: admin_pb2.CreateConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.CreateConsumerResponse:
        """Make a consumer."""
        by = author()
        wanted = request.consumer
        policy = policy_from_message(wanted.policy)
        consumer = await self._service.create_consumer(wanted.name, wanted.model, policy, by)
        return admin_pb2.CreateConsumerResponse(consumer=_message(consumer))

    async def UpdateConsumer(
        self, request: admin_pb2.UpdateConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.UpdateConsumerResponse:
        """Give a consumer another policy."""
        by = author()
        policy = policy_from_message(request.policy)
        consumer = await self._service.update_consumer(request.name, policy, by)
        return admin_pb2.UpdateConsumerResponse(consumer=_message(consumer))

    async def DeleteConsumer(
        self, request: admin_pb2.DeleteConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteConsumerResponse:
        """Forget a consumer."""
        await self._service.delete_consumer(request.name, author())
        return admin_pb2.DeleteConsumerResponse()

    async def PauseConsumer(
        self, request: admin_pb2.PauseConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.PauseConsumerResponse:
        """Hold a consumer's replicas at what they have."""
        by = author()
        consumer = await self._brake.pull(request.name, request.reason, by)
        return admin_pb2.PauseConsumerResponse(consumer=_message(consumer))

    async def ResumeConsumer(
        self, request: admin_pb2.ResumeConsumerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ResumeConsumerResponse:
        """Let a paused consumer go on."""
        consumer = await self._brake.release(request.name, author())
        return admin_pb2.ResumeConsumerResponse(consumer=_message(consumer))

    async def Inspect(
        self, request: admin_pb2.InspectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.InspectResponse:
        """Look at all rows."""
        found = await inspect(self._service, author())
        return admin_pb2.InspectResponse(tables=map(_inspected, found))

    async def VerifyReplica(
        self, request: admin_pb2.VerifyReplicaRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.VerifyReplicaResponse:
        """Have a replica read all its rows again."""
        found = await verify_replica(self._service, request.consumer, request.replica, author())
        return admin_pb2.VerifyReplicaResponse(
            version=found.version, tables=map(verified_to_message, found.tables)
        )

    async def ForgetReplica(
        self, request: admin_pb2.ForgetReplicaRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ForgetReplicaResponse:
        """Forget a replica that is away."""
        await self._removals.forget_replica(request.consumer, request.replica, author())
        return admin_pb2.ForgetReplicaResponse()

    async def DeleteModel(
        self, request: admin_pb2.DeleteModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteModelResponse:
        """Delete a model."""
        await self._removals.delete_model(request.name, author())
        return admin_pb2.DeleteModelResponse()

    async def DeleteTable(
        self, request: admin_pb2.DeleteTableRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteTableResponse:
        """Delete a table."""
        await self._removals.delete_table(request.model, request.table, author())
        return admin_pb2.DeleteTableResponse()

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
        by = author()
        pending = await self._service.delete_rows(request.model, request.table, request.ids, by)
        return admin_pb2.DeleteRowsResponse(pending=_pending(pending))

    async def ListPendingDeletes(
        self, request: admin_pb2.ListPendingDeletesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListPendingDeletesResponse:
        """List the deletes that are not done."""
        return admin_pb2.ListPendingDeletesResponse(pending=map(_pending, self._service.pending_deletes()))

    async def Backup(
        self, request: admin_pb2.BackupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.BackupResponse:
        """Make a backup."""
        by = author()
        backup = await self._backups.make(Path(request.directory), by)
        return admin_pb2.BackupResponse(files=backup.files, bytes=backup.bytes)

    async def MakeSnapshot(
        self, request: admin_pb2.MakeSnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.MakeSnapshotResponse:
        """Make a snapshot of a model."""
        made = await snapshots_of(self._service).make(request.model)
        return admin_pb2.MakeSnapshotResponse(version=made.version, bytes=made.bytes, new_bytes=made.new_bytes())

    async def MoveModel(
        self, request: admin_pb2.MoveModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.MoveModelResponse:
        """Give a model to another process."""
        self._service.model(request.model)
        await self._service.owners.move(request.model, request.process)
        return admin_pb2.MoveModelResponse()

    async def DrainProcess(
        self, request: admin_pb2.DrainProcessRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DrainProcessResponse:
        """Have a process give its models to others."""
        return admin_pb2.DrainProcessResponse(models=await drain_process(self._service, request.process))


def _inspected(table: InspectedTable) -> admin_pb2.InspectedTable:
    return admin_pb2.InspectedTable(**vars(table))


def _message(consumer: Consumer) -> admin_pb2.Consumer:
    return admin_pb2.Consumer(
        name=consumer.name,
        model=consumer.model,
        created=_timestamp(consumer.created_unix_ns),
        policy=policy_to_message(consumer.policy),
        pause=_pause(consumer.pause) if consumer.pause else None,
    )


def _pause(pause: Pause) -> admin_pb2.Pause:
    return admin_pb2.Pause(since=_timestamp(pause.since_unix_ns), by=pause.by, reason=pause.why)


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
