"""Managing consumers from a program."""

from collections.abc import Callable
from typing import TypeVar

import grpc

from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import Policy
from deltasync.v1 import admin_pb2, admin_pb2_grpc
from deltasync.wire.error_codes import from_rpc_error
from deltasync.wire.messages import policy_to_message

T = TypeVar("T")


class Admin:
    """Makes, changes and deletes the consumers of a service. Each call connects anew.

    Every method raises NotPermitted for a wrong token, ServiceUnavailable where the service cannot be reached, and
    what its call of the same name raises.
    """

    def __init__(self, service: Endpoint | str) -> None:
        """`service` is where it answers gRPC, with its admin token; an address alone is enough for a list.

        Raises:
            InvalidInput: the address is not HOST:PORT.
        """
        self._endpoint = Endpoint.of_grpc(service)

    def create_consumer(self, name: str, model: str, policy: Policy) -> None:
        """Make a consumer; making an equal one again changes nothing.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
        """
        consumer = admin_pb2.Consumer(name=name, model=model, policy=policy_to_message(policy))
        request = admin_pb2.CreateConsumerRequest(consumer=consumer)
        self._call(lambda stub: stub.CreateConsumer(request))

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

    def consumers(self) -> list[admin_pb2.Consumer]:
        """All consumers, by name."""
        request = admin_pb2.ListConsumersRequest()
        return list(self._call(lambda stub: stub.ListConsumers(request)).consumers)

    def _call(self, call: Callable[[admin_pb2_grpc.AdminServiceStub], T]) -> T:
        with self._endpoint.channel() as channel:
            try:
                return call(admin_pb2_grpc.AdminServiceStub(channel))
            except grpc.RpcError as error:
                raise from_rpc_error(error, self._endpoint.address) from error
