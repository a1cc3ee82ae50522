"""The service's process: gRPC and HTTP in one event loop, from recovery to drain."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import grpc.aio
import numba  # noqa: F401  # kernels would import it later than garbage collection is told what to pass over
import uvicorn
from fastapi import FastAPI
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deltasync.api import certificates as tls
from deltasync.api.access import Access
from deltasync.api.access_calls import AccessInterceptor
from deltasync.api.admin import AdminServicer
from deltasync.api.audit import Audit
from deltasync.api.call_errors import ErrorInterceptor
from deltasync.api.certificates import CertificateFiles
from deltasync.api.http import create_app
from deltasync.api.http_connections import HttpListener, end_silent
from deltasync.api.http_protocol import HttpProtocol
from deltasync.api.protocol import ProtocolInterceptor
from deltasync.api.publish import PublishServicer
from deltasync.api.reload import Reader, reload_on
from deltasync.api.roles_file import RolesFile
from deltasync.api.subscribe_calls import SubscribeServicer
from deltasync.api.tls_options import TlsOptions
from deltasync.api.written_messages import WrittenMessages
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import InvalidInput, ServiceUnavailable
from deltasync.core.events import EventKind
from deltasync.core.exposure import may_listen
from deltasync.core.limits import LimitOptions
from deltasync.core.listener import listening_socket
from deltasync.core.process import keep_freed_memory, raise_descriptor_limit, spare_imports, write_no_core
from deltasync.core.progress import Progress
from deltasync.kernels.compiled import imported_kernels, keep_in
from deltasync.service.housekeeping import housekeeping
from deltasync.service.service import Service, ServiceOptions
from deltasync.storage.volume import refused
from deltasync.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    subscribe_pb2,
    subscribe_pb2_grpc,
)

logger = logging.getLogger(__name__)

_SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (admin_pb2, "AdminService"),
        (publish_pb2, "PublishService"),
        (subscribe_pb2, "SubscribeService"),
    )
)

# Of a call: its token, and what gRPC itself says of it.
_METADATA_BYTES = 16 << 10
# For who connects, until it speaks.
_HANDSHAKE_MS = 10_000
# More than a peer may have are let begin, so that the next one is told why it is not.
_REFUSED_STREAMS = 16

# Who makes and changes the consumers that it starts with.
_SETTINGS = "the service's settings"

# For so long nobody is told that a model is recovering: most have by then.
_SOON_SECONDS = 1.0
# Before endpoints.json is written again.
_ANNOUNCE_AGAIN_SECONDS = 1.0

# Of endpoints.json. Another one means that `grpc` or `http` is written in another way.
_ENDPOINTS_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the service listens, and what it starts with.

    Attributes:
        service: what it keeps, and where.
        host: address to listen on.
        grpc_port: port for trainers and replicas; 0 = any free one.
        http_port: port for operators; 0 = any free one.
        consumers: consumers to make at the start if missing; those that exist get these policies.
        admin_token: token with role admin, beside those of `roles`; None, or an empty one, is none.
        roles: file that says who has which roles, see `core.roles`; None = anyone may publish, subscribe and read.
        insecure: listen on an address that others reach, whatever protects it.
        drain_seconds: how long open cuts may take to finish on SIGTERM.
        read_settings: reads what it takes of the configuration on SIGHUP; None where there is no file.
        tls: what TLS is spoken with on both ports; None = plain text.
    """

    service: ServiceOptions
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8080
    consumers: tuple[ConsumerOptions, ...] = ()
    admin_token: str | None = None
    roles: Path | None = None
    insecure: bool = False
    drain_seconds: float = 5.0
    read_settings: Reader | None = None
    tls: TlsOptions | None = None


@dataclass(frozen=True)
class _Addresses:
    """Where the service listens."""

    grpc: str
    http: str


class _Http(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before gRPC has drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: ServerOptions) -> None:
    """Run the service until SIGTERM or SIGINT; on SIGHUP, take the consumers and limits of its configuration.

    Raises:
        StorageFailed: the data directory is damaged or in use.
        ServiceUnavailable: a port is in use.
    """
    write_no_core()
    keep_freed_memory()
    spare_imports()
    _check_descriptors(options.service.limits, raise_descriptor_limit())
    os.umask(0o077)  # Only the service's own user may read a model's rows.
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    reloading = asyncio.Event()
    _on_hangup(asyncio.get_running_loop(), reloading.set)
    await run(options, stopping, reloading)


def _on_hangup(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    """Have the loop do something on SIGHUP, and nothing once it has ended: then a handler of its own would be
    gone, and the signal end the process.
    """

    def hang_up(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(do)

    signal.signal(signal.SIGHUP, hang_up)


def _check_descriptors(limits: LimitOptions, most: int) -> None:
    wanted = limits.http_connections + limits.grpc_connections
    if wanted > most:
        text = (
            "limits http_connections and grpc_connections are %d together, but this process may have %d files open"
        )
        logger.warning(f"{text}: raise that (ulimit -n), or lower those", wanted, most)


async def run(options: ServerOptions, stopping: asyncio.Event, reloading: asyncio.Event | None = None) -> None:
    """Run the service until `stopping` is set, in a process that has other things to do too.

    Whenever `reloading` is set, the consumers and limits of the configuration are read again.

    Raises:
        InvalidInput: others reach the address and nothing protects it, the roles file is not right, or the files
            for TLS are not there or do not fit each other.
        StorageFailed: the data directory is damaged or in use.
        ServiceUnavailable: a port is in use.
    """
    exposure = _checked_exposure(options)
    roles = RolesFile(options.roles) if options.roles else None
    certificates = CertificateFiles(options.tls) if options.tls else None
    async with asyncio.TaskGroup() as tasks:
        service = Service(options.service, tasks)
        keep_in(options.service.data_dir / "kernels")
        recovery = asyncio.create_task(service.recover())
        await service.configuration.take(options.consumers, _SETTINGS)
        await asyncio.wait({recovery}, timeout=_SOON_SECONDS)
        if recovery.done():  # Who has failed need not listen.
            await recovery
        access = _access(options, service, roles, exposure)
        also = [tasks.create_task(housekeeping(service))]
        if roles:
            also.append(tasks.create_task(roles.follow(access, service.events)))
        if certificates:
            also.append(tasks.create_task(certificates.follow(service)))
        reload_roles = partial(roles.reload, access, service.events) if roles else None
        hung_up = reloading or asyncio.Event()
        also.append(tasks.create_task(reload_on(hung_up, service, options.read_settings, reload_roles)))
        await _listen(service, options, tasks, stopping, recovery, access, certificates)
        for each in also:
            each.cancel()
        await service.drain()
    logger.info("stopped")


def _checked_exposure(options: ServerOptions) -> str:
    """What is to be known of where the service listens; empty if nothing is."""
    roles, insecure = options.roles is not None, options.insecure
    decision = may_listen(options.host, tls=options.tls is not None, roles=roles, insecure=insecure)
    if not decision.yes:
        raise InvalidInput(decision.reason)
    if decision.reason:
        logger.warning("%s", decision.reason)
    return decision.reason


def _access(options: ServerOptions, service: Service, roles: RolesFile | None, exposure: str) -> Access:
    access = Access(options.admin_token, roles.roles if roles else None, Audit(service.events))
    access.exposure = exposure
    return access


async def _listen(
    service: Service,
    options: ServerOptions,
    tasks: asyncio.TaskGroup,
    stopping: asyncio.Event,
    recovery: asyncio.Task[None],
    access: Access,
    certificates: CertificateFiles | None,
) -> None:
    listener = HttpListener(_bind(options.host, options.http_port), service.limits)
    server, healthy, grpc_port = _bind_grpc(service, options, access, certificates)
    app = create_app(service, access)
    http = _Http(_http_config(app, certificates))
    http_task = tasks.create_task(http.serve(sockets=[listener]))
    silence = tasks.create_task(end_silent(http.server_state.connections, service.limits))
    await _compile(service, stopping)
    await server.start()
    await _set_health(healthy, health_pb2.HealthCheckResponse.NOT_SERVING)
    scheme = "https" if certificates else "http"
    where = _Addresses(f"{options.host}:{grpc_port}", f"{scheme}://{options.host}:{listener.getsockname()[1]}")
    logger.info("listening: grpc=%s http=%s data=%s", where.grpc, where.http, options.service.data_dir)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, recovery}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done() and not recovery.exception():
        await _set_health(healthy, health_pb2.HealthCheckResponse.SERVING)
        await _announce(service, options, where, stopped)
        await stopped
    logger.info("shutting down")
    await healthy.enter_graceful_shutdown()
    service.draining.set()
    await service.wait_idle(options.drain_seconds)
    await server.stop(grace=1.0)
    http.should_exit = True
    await http_task
    silence.cancel()
    _withdraw(service, _endpoints(options))
    await recovery


async def _compile(service: Service, stopping: asyncio.Event) -> None:
    """Compile all kernels that it has, so that no cut waits for a compiler; or fewer, where it is to end."""
    kernels = imported_kernels()
    progress = Progress("compiling for this machine, once", len(kernels), "kernels")
    service.compiling = True
    for each in kernels:
        if not stopping.is_set():
            await asyncio.to_thread(each.compile)
            progress.add(1)
    service.compiling = False


def _http_config(app: FastAPI, certificates: CertificateFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        ssl_context_factory=(lambda *_: certificates.http_context()) if certificates else None,
    )


def _bind_grpc(
    service: Service, options: ServerOptions, access: Access, certificates: CertificateFiles | None
) -> tuple[grpc.aio.Server, health.aio.HealthServicer, int]:
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
            ("grpc.server_handshake_timeout_ms", int(tls.HANDSHAKE_SECONDS * 1000)),
        ],
    )
    publish_pb2_grpc.add_PublishServiceServicer_to_server(PublishServicer(service), server)
    subscribe_pb2_grpc.add_SubscribeServiceServicer_to_server(SubscribeServicer(service), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(service), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = f"{options.host}:{options.grpc_port}"
    try:
        if certificates:
            port = server.add_secure_port(address, certificates.grpc_credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServiceUnavailable(_not_bound("--grpc-port", options.host, options.grpc_port)) from error
    return server, healthy, port


def _limit_options(limits: LimitOptions) -> list[tuple[str, int]]:
    """What gRPC itself sees to, from the start on."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_peer + _REFUSED_STREAMS),
        ("grpc.max_connection_idle_ms", 1_000 * limits.grpc_idle_seconds),
        ("grpc.max_allowed_incoming_connections", limits.grpc_connections),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ServiceUnavailable(_not_bound("--http-port", host, port, error)) from error


def _not_bound(option: str, host: str, port: int, error: OSError | None = None) -> str:
    if error and (isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL):
        return f"cannot listen on {host}: {error.strerror}: choose a --host that is an address of this machine"
    return f"cannot listen on {host}:{port}: choose another {option}, or 0 for any free one"


def _endpoints(options: ServerOptions) -> Path:
    return options.service.data_dir / "endpoints.json"


async def _set_health(
    healthy: health.aio.HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType
) -> None:
    for name in ("", *_SERVICES):
        await healthy.set(name, status)


async def _announce(
    service: Service, options: ServerOptions, where: _Addresses, stopped: asyncio.Task[Literal[True]]
) -> None:
    """Write where the service listens into its data directory. On a full disk it serves what it has all the same,
    and tries again.
    """
    path, refusal = _endpoints(options), None
    while not stopped.done():
        try:
            _write_endpoints(path, where)
        except OSError as error:
            if refusal is None:
                refusal = refused(f"{path} cannot be written", path, error)
                service.events.emit(EventKind.FAILED, error=refusal)
        else:
            return
        await asyncio.wait({stopped}, timeout=_ANNOUNCE_AGAIN_SECONDS)


def _withdraw(service: Service, path: Path) -> None:
    """Remove what was written there; on a volume that takes nothing it stays, until the next start."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        service.events.emit(EventKind.FAILED, error=refused(f"{path} cannot be removed", path, error))


def _write_endpoints(path: Path, where: _Addresses) -> None:
    """Write them, atomically."""
    endpoints = {"format": _ENDPOINTS_FORMAT, "pid": os.getpid(), "grpc": where.grpc, "http": where.http}
    path.unlink(missing_ok=True)  # Of a process that was killed.
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(endpoints))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
