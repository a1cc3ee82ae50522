"""Managing consumers and deleting rows from a program."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import grpc

from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import InvalidInput
from deltasync.core.policy import Policy
from deltasync.v1 import admin_pb2, admin_pb2_grpc
from deltasync.wire.messages import policy_to_message

T = TypeVar("T")


class Admin:
    """Makes, changes, pauses and deletes consumers of a service, and has rows deleted. Each call connects anew.

    Every method raises NotPermitted for a wrong token, ServiceUnavailable where the service cannot be reached, and
    what its call of the same name raises.
    """

    def __init__(self, service: Endpoint | str) -> None:
        """`service` is where it answers gRPC, with its admin token; an address alone is enough for a list.

        Raises:
            InvalidInput: the address is not HOST:PORT.
        """
        self._endpoint = Endpoint.of_grpc(service)

    def describe(self) -> admin_pb2.DescribeResponse:
        """Which service answers, and where it answers HTTP."""
        return self._call(lambda stub: stub.Describe(admin_pb2.DescribeRequest()))

    def create_consumer(self, name: str, model: str, policy: Policy) -> admin_pb2.Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Returns:
            The consumer: paused, where a version of the model is in quarantine.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
        """
        consumer = admin_pb2.Consumer(name=name, model=model, policy=policy_to_message(policy))
        request = admin_pb2.CreateConsumerRequest(consumer=consumer)
        return self._call(lambda stub: stub.CreateConsumer(request)).consumer

    def update_consumer(self, name: str, policy: Policy) -> None:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        request = admin_pb2.UpdateConsumerRequest(name=name, policy=policy_to_message(policy))
        self._call(lambda stub: stub.UpdateConsumer(request))

    def delete_consumer(self, name: str) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: there is none of that name.
        """
        request = admin_pb2.DeleteConsumerRequest(name=name)
        self._call(lambda stub: stub.DeleteConsumer(request))

    def pause_consumer(self, name: str, reason: str = "") -> None:
        """Hold a consumer's replicas at what they have, whatever is published, until it is resumed.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a reason of more than 400 characters, or of several lines.
        """
        request = admin_pb2.PauseConsumerRequest(name=name, reason=reason)
        self._call(lambda stub: stub.PauseConsumer(request))

    def resume_consumer(self, name: str) -> None:
        """Let a paused consumer go on, with all that its replicas lack.

        Raises:
            NotFound: there is none of that name.
        """
        request = admin_pb2.ResumeConsumerRequest(name=name)
        self._call(lambda stub: stub.ResumeConsumer(request))

    def forget_replica(self, consumer: str, replica: str) -> None:
        """Forget a replica that is away: no lag counts it any more.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is connected.
        """
        request = admin_pb2.ForgetReplicaRequest(consumer=consumer, replica=replica)
        self._call(lambda stub: stub.ForgetReplica(request))

    def delete_model(self, name: str) -> None:
        """Delete a model, with its tables and all that is kept of it.

        Raises:
            NotFound: there is none of that name.
            Contradiction: a rank publishes it, or a consumer follows it.
        """
        request = admin_pb2.DeleteModelRequest(name=name)
        self._call(lambda stub: stub.DeleteModel(request))

    def delete_table(self, model: str, table: str) -> None:
        """Delete a table of a model; replicas are not sent it any more.

        Raises:
            NotFound: there is no such model, or no such table in it.
            Contradiction: a rank publishes it, or another table belongs to it.
        """
        request = admin_pb2.DeleteTableRequest(model=model, table=table)
        self._call(lambda stub: stub.DeleteTable(request))

    def consumers(self) -> list[admin_pb2.Consumer]:
        """All consumers, by name."""
        request = admin_pb2.ListConsumersRequest()
        return list(self._call(lambda stub: stub.ListConsumers(request)).consumers)

    def delete_rows(self, model: str, table: str, ids: Iterable[int]) -> admin_pb2.PendingDelete:
        """Have rows deleted: of the trainer, of the service and of all replicas.

        The request is durable once this returns. The trainer meets it with one of its next cuts; while there is
        none that can, it is pending.

        Args:
            model: the model.
            table: one of its embedding tables.
            ids: global row ids, in any order: 1 to 100,000 of them.

        Raises:
            NotFound: no such model, or no such table in it.
            InvalidInput: no ids or too many, an id outside of the table, or a table that is none of embeddings.
            Contradiction: too many deletes of the model are pending.
        """
        wanted = list(ids)
        if wanted and min(wanted) < 0:
            raise InvalidInput(f"row {min(wanted)} of table {table!r}: rows count from 0")
        request = admin_pb2.DeleteRowsRequest(model=model, table=table, ids=wanted)
        return self._call(lambda stub: stub.DeleteRows(request)).pending

    def pending_deletes(self) -> list[admin_pb2.PendingDelete]:
        """The deletes that are asked for and not done, by model and number; each with what it waits for."""
        request = admin_pb2.ListPendingDeletesRequest()
        return list(self._call(lambda stub: stub.ListPendingDeletes(request)).pending)

    def backup(self, directory: str, timeout_seconds: float = 7 * 86400.0) -> admin_pb2.BackupResponse:
        """Have the service copy all that it keeps, while it goes on; its log says how far it has come.

        Args:
            directory: absolute path of a folder on the service's machine: empty, or to be made.
            timeout_seconds: how long it may take.

        Returns:
            What the backup has, once it is complete.

        Raises:
            InvalidInput: the path is relative or inside of the data directory, or the folder has something.
            Contradiction: another backup is being made.
            StorageFailed: something could not be read or written.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        return patient._call(lambda stub: stub.Backup(admin_pb2.BackupRequest(directory=directory)))

    def inspect(self, timeout_seconds: float = 7 * 86400.0) -> list[admin_pb2.InspectedTable]:
        """Have the service look at all rows that it keeps, at full speed; its log says how far it has come.

        Args:
            timeout_seconds: how long it may take.

        Returns:
            What was found of each table, and what is left once it has mended what it can.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        return list(patient._call(lambda stub: stub.Inspect(admin_pb2.InspectRequest())).tables)

    def verify_replica(
        self, consumer: str, replica: str, timeout_seconds: float = 86400.0
    ) -> admin_pb2.VerifyReplicaResponse:
        """Have a replica read again all rows that it holds; those that differ are sent again.

        Args:
            consumer: the name of its consumer.
            replica: its name.
            timeout_seconds: how long it may take.

        Returns:
            How each table compares with what the replica was sent.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is away, holds nothing yet, or its client does not know how.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        request = admin_pb2.VerifyReplicaRequest(consumer=consumer, replica=replica)
        return patient._call(lambda stub: stub.VerifyReplica(request))

    def make_snapshot(self, model: str, timeout_seconds: float = 86400.0) -> admin_pb2.MakeSnapshotResponse:
        """Have a snapshot of a model made now, where the service's snapshots go.

        Args:
            model: the model.
            timeout_seconds: how long it may take.

        Raises:
            NotFound: no such model, or nothing of it is published.
            Contradiction: the service has no place for snapshots.
            StorageFailed: it could not be made.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        return patient._call(lambda stub: stub.MakeSnapshot(admin_pb2.MakeSnapshotRequest(model=model)))

    def move_model(self, model: str, process: str, timeout_seconds: float = 86400.0) -> None:
        """Have another process of the service own a model.

        Args:
            model: the model.
            process: the name of that process.
            timeout_seconds: how long it may take: a snapshot is made first.

        Raises:
            NotFound: no such model, or no such process.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        request = admin_pb2.MoveModelRequest(model=model, process=process)
        patient._call(lambda stub: stub.MoveModel(request))

    def drain_process(self, process: str = "", timeout_seconds: float = 86400.0) -> list[str]:
        """Have a process give all its models to others, and take none any more.

        Args:
            process: its name; empty is the one that answers.
            timeout_seconds: how long it may take.

        Returns:
            The names of these models.

        Raises:
            NotFound: no such process.
            Contradiction: there is no other that could have them.
        """
        patient = Admin(replace(self._endpoint, timeout_seconds=timeout_seconds))
        return list(patient._call(lambda stub: stub.DrainProcess(_drain(process))).models)

    def _call(self, call: Callable[[admin_pb2_grpc.AdminServiceStub], T]) -> T:
        route = Route(self._endpoint)
        while True:
            endpoint = route.endpoint
            with endpoint.channel() as channel:
                try:
                    return call(admin_pb2_grpc.AdminServiceStub(channel))
                except grpc.RpcError as failure:
                    error = endpoint.error_of(failure)
                    if not route.turn(error):
                        raise error from failure


def _drain(process: str) -> admin_pb2.DrainProcessRequest:
    return admin_pb2.DrainProcessRequest(process=process)
