"""The gRPC server for trainers and replicas."""

import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltasync.access.limits import LimitOptions, Limits
from deltasync.access.rights import Access
from deltasync.access.tls import HANDSHAKE_SECONDS, CertificateFiles
from deltasync.api.errors import abort, as_stream
from deltasync.api.interceptor import AccessInterceptor
from deltasync.api.publish import PublishServicer
from deltasync.api.subscribe import SubscribeServicer
from deltasync.base.addresses import with_port
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.waiting import Signal
from deltasync.v1 import (
    publish_pb2,
    publish_pb2_grpc,
    subscribe_pb2,
    subscribe_pb2_grpc,
)
from deltasync.wire.errors import check_protocol
from deltasync.wire.row_messages import read_request, serialized


def not_bound(option: str, host: str, port: int, error: OSError | None = None) -> str:
    """The message for a failure to listen on a port, with the remedy."""
    if error and (isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL):
        return f"cannot listen on {host}: {error.strerror}; choose a --host that is an address of this machine"
    return f"cannot listen on {host}:{port}; choose another {option}, or 0 for any free port"


_PUBLISH = f"/{publish_pb2.DESCRIPTOR.services_by_name['PublishService'].full_name}/Publish"


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers answer with encoded messages, and receive rows as views of the bytes.

    It answers undecodable bytes with InvalidInput, where gRPC would answer UNKNOWN with a traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the decoder and encoder of a handler."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        decode = read_request if method == _PUBLISH else handler.request_deserializer

        def decoded(request: bytes) -> Any:
            try:
                return decode(request)
            except DecodeError as error:
                text = f"{method}: {len(request)} bytes are not a valid message of this method"
                raise InvalidInput(text) from error

        return handler._replace(request_deserializer=decoded, response_serializer=serialized)


# Prefix of our methods; health checks and reflection have their own protocol.
_METHODS = "/deltasync."


class ProtocolInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call whose client uses another version of the protocol."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, or one that refuses it."""
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

    # This reads no message, because an undecodable one would replace the error.
    return as_stream(handler, refuse)


_Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Answers health checks; all services serve, or none.

    In gRPC's own servicer, a watcher that reads no answers blocks all others and the shutdown.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Start with all services not serving."""
        self._services = frozenset({"", *services})
        self._serving = False
        self._signal = Signal()

    def set(self, *, serving: bool) -> None:
        """Set whether the services serve, and notify all watchers."""
        self._serving = serving
        self._signal.wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Answer once."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._answer(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Answer now and after every change."""
        last = None
        while True:
            answer = self._answer(request.service)
            if answer == last:
                await self._signal.changed()
                continue
            last = answer
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

# Maximum size of a call's metadata: its token and gRPC's own entries.
_METADATA_BYTES = 16 << 10
# gRPC admits this many streams beyond a peer's limit. The service then refuses them with a reason.
_REFUSED_STREAMS = 16


@dataclass(frozen=True)
class GrpcServer:
    """A server bound to a port."""

    server: grpc.aio.Server
    health: Health
    port: int


def bind_grpc(
    publisher: PublishServicer,
    subscriber: SubscribeServicer,
    limits: Limits,
    host: str,
    port: int,
    access: Access,
    certificates: CertificateFiles | None,
) -> GrpcServer:
    """Bind the server to its port."""
    server = grpc.aio.server(
        interceptors=[
            AccessInterceptor(access, limits),
            ProtocolInterceptor(),
            MessageInterceptor(),
        ],
        options=[
            *_limit_options(limits.options),
            # Otherwise a second service on the same port would get half of the streams.
            ("grpc.so_reuseport", 0),
            # Clients in other languages may ping, which gRPC would take for an attack.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # Our clients send `Alive`. The service pings for all others, and for connections without a stream.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        ],
    )
    publish_pb2_grpc.add_PublishServiceServicer_to_server(publisher, server)
    subscribe_pb2_grpc.add_SubscribeServiceServicer_to_server(subscriber, server)
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
    """The limits that gRPC itself enforces, fixed at the start."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_peer + _REFUSED_STREAMS),
        ("grpc.max_connection_idle_ms", 1_000 * limits.grpc_idle_seconds),
        ("grpc.max_allowed_incoming_connections", limits.grpc_connections),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    ]
