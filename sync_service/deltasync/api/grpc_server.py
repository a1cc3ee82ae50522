"""The gRPC side, for trainers and replicas: its port, what it serves there, and what gRPC itself sees to."""

from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltasync.api.access import Access
from deltasync.api.access_calls import AccessInterceptor
from deltasync.api.binding import not_bound
from deltasync.api.call_errors import ErrorInterceptor
from deltasync.api.certificates import HANDSHAKE_SECONDS, CertificateFiles
from deltasync.api.health import Health
from deltasync.api.protocol import ProtocolInterceptor
from deltasync.api.publish import PublishServicer
from deltasync.api.server_options import ServerOptions
from deltasync.api.subscribe_calls import SubscribeServicer
from deltasync.api.written_messages import WrittenMessages
from deltasync.core.addresses import with_port
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.limits import LimitOptions
from deltasync.service.service import Service
from deltasync.v1 import (
    publish_pb2,
    publish_pb2_grpc,
    subscribe_pb2,
    subscribe_pb2_grpc,
)

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
    service: Service, options: ServerOptions, access: Access, certificates: CertificateFiles | None
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
            WrittenMessages(),
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
    address = with_port(options.host, options.grpc_port)
    try:
        if certificates:
            port = server.add_secure_port(address, certificates.grpc_credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServiceUnavailable(not_bound("--grpc-port", options.host, options.grpc_port)) from error
    return GrpcServer(server, healthy, port)


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
