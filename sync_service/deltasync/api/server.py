"""The service's process: gRPC and HTTP in one event loop, from recovery to drain."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial

import numba  # noqa: F401  # kernels would import it later than garbage collection is told what to pass over
import uvicorn
from fastapi import FastAPI

from deltasync.access.access import Access, RolesFile
from deltasync.access.audit import Audit
from deltasync.access.tls import CertificateFiles
from deltasync.api.endpoints_file import Addresses, EndpointsFile
from deltasync.api.grpc_server import bind_grpc, not_bound
from deltasync.api.http import create_app
from deltasync.api.http_server import HttpListener, HttpProtocol, end_silent
from deltasync.api.reload import Reader, Reloaded, reload_on
from deltasync.api.server_options import ServerOptions
from deltasync.api.shared_log import member, open_logs
from deltasync.base.addresses import may_listen, with_port
from deltasync.base.build import built_commit
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.process import (
    keep_freed_memory,
    listening_socket,
    raise_descriptor_limit,
    spare_imports,
    write_no_core,
)
from deltasync.base.progress import Progress
from deltasync.cluster.member import Member
from deltasync.cluster.owners import Alone
from deltasync.kernels.compiled import imported_kernels, keep_in
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.service.configuration import have_probe_consumers
from deltasync.service.housekeeping import housekeeping
from deltasync.service.probe import ProbeStatus, probe_of
from deltasync.service.service import Service
from deltasync.status.answers import Answers, Sampler

logger = logging.getLogger(__name__)

# Who makes and changes the consumers that it starts with.
_SETTINGS = "the service's settings"

# For so long nobody is told that a model is recovering: most have by then.
_SOON_SECONDS = 1.0


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
    options = _within(options, raise_descriptor_limit())
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


def _within(options: ServerOptions, files: int) -> ServerOptions:
    """The options, also those that are read again, with no more connections than this process has descriptors for:
    else whoever connects often enough takes those of its own files, and of everybody else.
    """
    limits, read = options.service.limits.within(files), options.read_settings
    if limits != options.service.limits:
        logger.warning(
            "this process may have %d files open: limits http_connections and grpc_connections are lowered to %d "
            "and %d; raise that (ulimit -n)",
            files,
            limits.http_connections,
            limits.grpc_connections,
        )
    return replace(
        options,
        service=replace(options.service, limits=limits),
        read_settings=read and partial(_read_within, read, files),
    )


def _read_within(read: Reader, files: int) -> Reloaded:
    found = read()
    return replace(found, limits=found.limits.within(files))


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
    logs = await open_logs(options.shared, options.service.data_dir) if options.shared else None
    async with asyncio.TaskGroup() as tasks:
        service = Service(options.service, tasks, logs)
        keep_in(options.service.data_dir / "kernels")
        recovery = asyncio.create_task(service.recover())
        await service.configuration.take(options.consumers, _SETTINGS)
        await asyncio.wait({recovery}, timeout=_SOON_SECONDS)
        if recovery.done():  # Who has failed need not listen.
            await recovery
        access = _access(options, service, roles, exposure)
        also = [tasks.create_task(housekeeping(service)), tasks.create_task(service.checkpoints.run())]
        if roles:
            also.append(tasks.create_task(roles.follow(access, service.events)))
        if certificates:
            also.append(tasks.create_task(certificates.follow(service.events, service.certificates_expire)))
        reload_roles = partial(roles.reload, access, service.events) if roles else None
        hung_up = reloading or asyncio.Event()
        also.append(tasks.create_task(reload_on(hung_up, service, options.read_settings, reload_roles)))
        await _listen(service, options, tasks, stopping, recovery, access, certificates)
        for each in also:
            each.cancel()
        await asyncio.wait(also)  # Some write files of the data directory, in threads.
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
    server = bind_grpc(service, options, access, certificates)
    endpoints = EndpointsFile(options.service.data_dir, service.events)
    sampler = Sampler(service, Answers(service), lambda: access.troubles)
    sampling = tasks.create_task(sampler.run())
    await asyncio.to_thread(built_commit)  # Now, since a checkout may move on while the service runs.
    app = create_app(service, access, sampler)
    http = _Http(_http_config(app, certificates))
    http_task = tasks.create_task(http.serve(sockets=[listener]))
    silence = tasks.create_task(end_silent(http.server_state.connections, service.limits))
    await _compile(service, stopping)
    await server.server.start()
    scheme = "https" if certificates else "http"
    http_address = with_port(options.host, listener.getsockname()[1])
    where = Addresses(with_port(options.host, server.port), f"{scheme}://{http_address}")
    if isinstance(service.owners, Alone):
        service.owners.me = Member("", where.grpc, where.http)
    logger.info("listening: grpc=%s http=%s data=%s", where.grpc, where.http, options.service.data_dir)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, recovery}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done() and not recovery.exception():
        async with _among_others(service, options, where):
            server.health.note(serving=True)
            await endpoints.announce(where, stopped)
            async with _probing(service, options, where):
                await stopped
                server.health.note(serving=False)
    logger.info("shutting down")
    server.health.note(serving=False)
    service.draining.set()
    await service.wait_idle(options.drain_seconds)
    await server.server.stop(grace=1.0)
    http.should_exit = True
    await http_task
    silence.cancel()
    sampling.cancel()
    endpoints.withdraw()
    await recovery


@contextlib.asynccontextmanager
async def _probing(service: Service, options: ServerOptions, where: Addresses) -> AsyncIterator[None]:
    """While the block runs, a row goes all the way again and again, if one is to."""
    if options.probe is None:
        yield
        return
    service.probe = ProbeStatus(probe_of(service.owners.me.name))
    consumers = asyncio.create_task(have_probe_consumers(service, service.probe, _SETTINGS))
    probe = await asyncio.to_thread(options.probe, where.grpc, service.probe)
    try:
        yield
    finally:
        consumers.cancel()
        await asyncio.to_thread(probe.close)


@contextlib.asynccontextmanager
async def _among_others(service: Service, options: ServerOptions, where: Addresses) -> AsyncIterator[None]:
    """While the block runs, the process owns models with those that share its log, if others do."""
    if options.shared is None or not isinstance(service.logs, JetStreamLogs):
        yield
        return
    async with member(service, options.shared, service.logs, where):
        yield


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


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ServiceUnavailable(not_bound("--http-port", host, port, error)) from error
