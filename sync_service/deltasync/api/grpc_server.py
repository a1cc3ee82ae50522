"""The gRPC side, for trainers and replicas: its port, its services, and what gRPC itself sees to."""

import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltasync.access.limits import LimitOptions
from deltasync.access.rights import Access
from deltasync.access.tls import HANDSHAKE_SECONDS, CertificateFiles
from deltasync.api.errors import ErrorInterceptor, abort, as_stream
from deltasync.api.interceptor import AccessInterceptor
from deltasync.api.publish import PublishServicer
from deltasync.api.subscribe import SubscribeServicer
from deltasync.base.addresses import with_port
from deltasync.base.errors import DeltasyncError, ServiceUnavailable
from deltasync.base.waiting import Signal
from deltasync.service.service import Service
from deltasync.v1 import (
    publish_pb2,
    publish_pb2_grpc,
    subscribe_pb2,
    subscribe_pb2_grpc,
)
from deltasync.wire.errors import check_protocol
from deltasync.wire.row_messages import read_request, serialized


def not_bound(option: str, host: str, port: int, error: OSError | None = None) -> str:
    """The message for a port that cannot be listened on: why, and what to do."""
    if error and (isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL):
        return f"cannot listen on {host}: {error.strerror}: choose a --host that is an address of this machine"
    return f"cannot listen on {host}:{port}: choose another {option}, or 0 for any free one"


_PUBLISH = f"/{publish_pb2.DESCRIPTOR.services_by_name['PublishService'].full_name}/Publish"


class RowMessages(grpc.aio.ServerInterceptor):
    """Lets handlers answer with messages that are bytes already, and take rows as views of the bytes received."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, with other functions between messages and bytes."""
        handler = await continuation(handler_call_details)
        if handler and handler_call_details.method == _PUBLISH:
            handler = handler._replace(request_deserializer=read_request)
        return handler and handler._replace(response_serializer=serialized)


# Health checks and reflection have a protocol of their own.
_METHODS = "/deltasync."


class ProtocolInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call begin only if its client speaks the protocol of this service."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_METHODS):
            return handler
        try:
            check_protocol(dict(handler_call_details.invocation_metadata or ()))
        except DeltasyncError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: DeltasyncError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # It asks for no message: one that this service cannot read must not be answered in other words.
    return as_stream(handler, refuse)


_Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Tells whether services serve: all of them, or none.

    With gRPC's own servicer all watchers wait for each other: one that reads no answers keeps the others from
    theirs, and the process from ending.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Begin with services that do not serve yet."""
        self._services = frozenset({"", *services})
        self._serving = False
        self._signal = Signal()

    def note(self, *, serving: bool) -> None:
        """Note whether they serve, and tell all watchers."""
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


_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (publish_pb2, "PublishService"),
        (subscribe_pb2, "SubscribeService"),
    )
)

# Of a call: its token, and what gRPC itself says of it.
_METADATA_BYTES = 16 << 10
# More than a peer may have are let begin, so that the next one is told why it is not.
_REFUSED_STREAMS = 16


@dataclass(frozen=True)
class GrpcServer:
    """A server that has its port.

    Attributes:
        server: serves once it is started.
        health: what it says to health checks: that it does not serve, until it is told that it does.
        port: the port.
    """

    server: grpc.aio.Server
    health: Health
    port: int


def bind_grpc(
    service: Service, host: str, port: int, access: Access, certificates: CertificateFiles | None
) -> GrpcServer:
    """Take the port.

    Raises:
        ServiceUnavailable: it is in use.
    """
    server = grpc.aio.server(
        interceptors=[
            AccessInterceptor(access, service.limits),
            ProtocolInterceptor(),
            ErrorInterceptor(),
            RowMessages(),
        ],
        options=[
            *_limit_options(service.limits.options),
            # Otherwise a second service on the same port would take half of the streams.
            ("grpc.so_reuseport", 0),
            # Below the client's keepalive interval, or clients are refused for pinging too often.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        ],
    )
    publish_pb2_grpc.add_PublishServiceServicer_to_server(PublishServicer(service), server)
    subscribe_pb2_grpc.add_SubscribeServiceServicer_to_server(SubscribeServicer(service), server)
    healthy = Health(_SERVICES)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = with_port(host, port)
    try:
        if certificates:
            bound = server.add_secure_port(address, certificates.grpc_credentials())
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServiceUnavailable(not_bound("--grpc-port", host, port)) from error
    return GrpcServer(server, healthy, bound)


def _limit_options(limits: LimitOptions) -> list[tuple[str, int]]:
    """What gRPC itself sees to, from the start on."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_peer + _REFUSED_STREAMS),
        ("grpc.max_connection_idle_ms", 1_000 * limits.grpc_idle_seconds),
        ("grpc.max_allowed_incoming_connections", limits.grpc_connections),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    ]
