"""The service's process: gRPC and HTTP in one event loop, from recovery to drain."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numba  # noqa: F401  # kernels would import it later than garbage collection is told what to pass over
import uvicorn
from fastapi import FastAPI

from deltasync.access.audit import Audit
from deltasync.access.rights import Access, RolesFile
from deltasync.access.tls import CertificateFiles, TlsOptions
from deltasync.api.application import create_app, sources_of
from deltasync.api.grpc_server import bind_grpc, not_bound
from deltasync.api.http_server import HttpListener, HttpProtocol, end_silent
from deltasync.api.reload import Reader, Reload, Reloaded
from deltasync.base.addresses import listening_host, may_listen, with_port
from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.process import (
    built_commit,
    keep_freed_memory,
    listening_socket,
    raise_descriptor_limit,
    spare_imports,
    write_no_core,
)
from deltasync.base.progress import Progress
from deltasync.cluster.member import Member, OwnershipOptions
from deltasync.cluster.owners import Alone
from deltasync.cluster.shared_owners import SharedOwners
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.kernels.compiled import imported_kernels, keep_in
from deltasync.log.brokers import BrokerOptions, connect
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.log.volume import refused
from deltasync.service.options import ServiceOptions
from deltasync.service.self_test import ProbeStatus, probe_of
from deltasync.service.service import Service
from deltasync.status.answers import Sampler
from deltasync.status.sources import ProcessState

logger = logging.getLogger(__name__)

# The author of the consumers that the service starts with.
_SETTINGS = "the service's settings"
# Most models recover within this time: it listens later, and need not refuse streams.
_SOON_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SharedLogOptions:
    """The brokers that keep the logs of several processes, and how the others see this process.

    Attributes:
        brokers: the brokers.
        process: name of this process among the processes of the service.
        grpc: where others reach it by gRPC, HOST:PORT; empty = where it listens.
        http: where others reach it by HTTP, a URL; empty = where it listens.
        ownership: how it takes part in owning models.
        accept_risk: serve although brokers could lose what they have acknowledged.
    """

    brokers: BrokerOptions
    process: str
    grpc: str = ""
    http: str = ""
    ownership: OwnershipOptions = field(default_factory=OwnershipOptions)
    accept_risk: bool = False

    def __post_init__(self) -> None:
        check_name("process", self.process)
        if self.http and not self.http.startswith(("http://", "https://")):
            raise InvalidInput(f"--advertise-http: {self.http!r} is no URL")


class Closable(Protocol):
    """Something that runs until it is closed."""

    def close(self) -> None:
        """End it; blocks."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the service listens, and what it starts with.

    Attributes:
        service: what it keeps, and where.
        host: address to listen on.
        grpc_port: port for trainers and replicas; 0 = any free one.
        http_port: port for operators; 0 = any free one.
        consumers: consumers to make at the start if missing; those that exist get these policies.
        admin_token: token with role admin, beside those of `roles`; None or empty = no such token.
        roles: roles file, see `access.roles`; None = anyone may publish, subscribe and read.
        insecure: listen on an address that others reach, even without protection.
        drain_seconds: seconds that open cuts may take to finish on SIGTERM.
        read_settings: reads the part of the configuration that may change, on SIGHUP; None = there is no file.
        tls: files for TLS on both ports; None = plain text.
        shared: brokers that keep the log for several processes; None = this process has a log of its own.
        probe: starts a probe, given the gRPC address and what it keeps up to date; None = no probe.
    """

    service: ServiceOptions
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8080
    consumers: tuple[ConsumerOptions, ...] = ()
    admin_token: str | None = field(default=None, repr=False)
    roles: Path | None = None
    insecure: bool = False
    drain_seconds: float = 5.0
    read_settings: Reader | None = None
    tls: TlsOptions | None = None
    shared: SharedLogOptions | None = None
    probe: Callable[[str, ProbeStatus], Closable] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", listening_host(self.host))
        if self.shared and not self.service.checkpoints:
            raise InvalidInput(
                "--log: give --checkpoints too, where another process finds a model that it takes over"
            )


@dataclass(frozen=True)
class Addresses:
    """Where the service listens: HOST:PORT of gRPC, a URL of HTTP."""

    grpc: str
    http: str


async def serve(options: ServerOptions) -> None:
    """Run the service until SIGTERM or SIGINT; on SIGHUP, read the consumers and limits of its configuration
    again.

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
    """Do something in the loop on SIGHUP. After the end of the loop the signal does nothing; a handler of the loop
    would be gone then, and the signal would end the process.
    """

    def hang_up(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(do)

    signal.signal(signal.SIGHUP, hang_up)


def _within(options: ServerOptions, files: int) -> ServerOptions:
    """The options, also when they are read again, with no more connections than this process has descriptors for.

    Otherwise a peer that connects often enough would take the descriptors of the service's own files.
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
    reloaded = read()
    return replace(reloaded, limits=reloaded.limits.within(files))


async def run(options: ServerOptions, stopping: asyncio.Event, reloading: asyncio.Event | None = None) -> None:
    """Run the service until `stopping` is set, in a process that may have other things to do.

    Whenever `reloading` is set, it reads the consumers and limits of the configuration again.

    Raises:
        InvalidInput: others reach the address and nothing protects it, the roles file is wrong, or the files for
            TLS are missing or do not fit each other.
        StorageFailed: the data directory is damaged or in use.
        ServiceUnavailable: a port is in use.
    """
    exposure = _checked_exposure(options)
    roles = RolesFile(options.roles) if options.roles else None
    certificates = CertificateFiles(options.tls) if options.tls else None
    logs = await open_logs(options.shared, options.service.data_dir) if options.shared else None
    async with asyncio.TaskGroup() as tasks:
        service = Service(options.service, tasks, logs)
        process = ProcessState(draining=service.draining)
        keep_in(options.service.data_dir / "kernels")
        recovery = asyncio.create_task(service.recovery.all())
        await service.consumers.configure(options.consumers, _SETTINGS)
        await asyncio.wait({recovery}, timeout=_SOON_SECONDS)
        if recovery.done():  # If it has failed, there is no need to listen.
            await recovery
        access = _access(options, service, roles, exposure)
        also = [tasks.create_task(service.run()), tasks.create_task(service.checkpoints.run())]
        if roles:
            also.append(tasks.create_task(roles.follow(access, service.events)))
        if certificates:
            also.append(tasks.create_task(certificates.follow(service.events, process.certificates_expire)))
        reload_roles = partial(roles.reload, access, service.events) if roles else None
        hung_up = reloading or asyncio.Event()
        reload = Reload(service.consumers, service.registry, service.limits, service.events)
        also.append(tasks.create_task(reload.run(hung_up, options.read_settings, reload_roles)))
        await _listen(service, process, options, tasks, stopping, recovery, access, certificates)
        for each in also:
            each.cancel()
        await asyncio.wait(also)  # Their threads may still write files of the data directory.
        await service.drain()
    logger.info("stopped")


def _checked_exposure(options: ServerOptions) -> str:
    """A warning about where the service listens; empty if there is none."""
    roles, insecure = options.roles is not None, options.insecure
    decision = may_listen(options.host, tls=options.tls is not None, roles=roles, insecure=insecure)
    if not decision.yes:
        raise InvalidInput(decision.reason)
    if decision.reason:
        logger.warning("%s", decision.reason)
    return decision.reason


async def open_logs(options: SharedLogOptions, data_dir: Path) -> JetStreamLogs:
    """Open the logs, after checking whether brokers could lose what they have acknowledged.

    Raises:
        InvalidInput: they could, and the options do not accept that; or the data directory has a log of its own,
            whose checkpoints would be removed as those of models that others own.
        StorageFailed: no broker can be used.
    """
    if (own := data_dir / "log" / "data.mdb").exists():
        raise InvalidInput(
            f"{data_dir} is the data directory of a service with a log of its own, {own}: a process whose log is "
            "among brokers removes checkpoints there of models that it does not own: give it another --data-dir"
        )
    logs = await asyncio.to_thread(JetStreamLogs, options.brokers, options.process)
    try:
        logs.accepted_risks = await asyncio.to_thread(logs.risks)
        if logs.accepted_risks and not options.accept_risk:
            raise InvalidInput(f"{'; '.join(logs.accepted_risks)}: mend it, or accept it with --accept-log-risk")
    except BaseException:
        await asyncio.to_thread(logs.close)
        raise
    for risk in logs.accepted_risks:
        logger.warning("accepted: %s", risk)
    return logs


def _access(options: ServerOptions, service: Service, roles: RolesFile | None, exposure: str) -> Access:
    access = Access(options.admin_token, roles.roles if roles else None, Audit(service.events))
    access.exposure = exposure
    return access


async def _listen(
    service: Service,
    process: ProcessState,
    options: ServerOptions,
    tasks: asyncio.TaskGroup,
    stopping: asyncio.Event,
    recovery: asyncio.Task[None],
    access: Access,
    certificates: CertificateFiles | None,
) -> None:
    listener = HttpListener(_bind(options.host, options.http_port), service.limits)
    server = bind_grpc(service, options.host, options.grpc_port, access, certificates)
    endpoints = EndpointsFile(options.service.data_dir, service.events)
    sampler = Sampler(sources_of(service, process), service.events, access)
    sampling = tasks.create_task(sampler.run())
    await asyncio.to_thread(built_commit)  # Now, since a checkout may move on while the service runs.
    app = create_app(service, access, sampler)
    http = _Http(_http_config(app, certificates))
    http_task = tasks.create_task(http.serve(sockets=[listener]))
    silence = tasks.create_task(end_silent(http.server_state.connections, service.limits))
    await _compile(process, stopping)
    await server.server.start()
    scheme = "https" if certificates else "http"
    http_address = with_port(options.host, listener.getsockname()[1])
    where = Addresses(with_port(options.host, server.port), f"{scheme}://{http_address}")
    if isinstance(service.models.owners, Alone):
        service.models.owners.me = Member("", where.grpc, where.http)
    logger.info("listening: grpc=%s http=%s data=%s", where.grpc, where.http, options.service.data_dir)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, recovery}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done() and not recovery.exception():
        async with _among_others(service, options, where):
            server.health.note(serving=True)
            await endpoints.announce(where, stopped)
            async with _probing(service, process, options, where):
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


class _Http(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before gRPC has drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


async def _compile(process: ProcessState, stopping: asyncio.Event) -> None:
    """Compile all kernels, because cuts must not wait for a compiler. Stop early if the service is to end."""
    kernels = imported_kernels()
    progress = Progress("compiling for this machine, once", len(kernels), "kernels")
    process.compiling = True
    for each in kernels:
        if not stopping.is_set():
            await asyncio.to_thread(each.compile)
            progress.add(1)
    process.compiling = False


# The format of endpoints.json.
_FORMAT = 1
# Pause before the next try to write it.
_AGAIN_SECONDS = 1.0


class EndpointsFile:
    """`endpoints.json` of a data directory, there while the service listens."""

    def __init__(self, data_dir: Path, events: Events) -> None:
        self._path = data_dir / "endpoints.json"
        self._events = events

    async def announce(self, where: Addresses, stopped: asyncio.Task[Literal[True]]) -> None:
        """Write where the service listens. If the disk is full, try again; the service goes on meanwhile."""
        refusal = None
        while not stopped.done():
            try:
                self._write(where)
            except OSError as error:
                if refusal is None:
                    refusal = refused(f"{self._path} cannot be written", self._path, error)
                    self._events.emit(EventKind.FAILED, error=refusal)
            else:
                return
            await asyncio.wait({stopped}, timeout=_AGAIN_SECONDS)

    def withdraw(self) -> None:
        """Remove the file; on a volume that refuses writes it stays until the next start."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            refusal = refused(f"{self._path} cannot be removed", self._path, error)
            self._events.emit(EventKind.FAILED, error=refusal)

    def _write(self, where: Addresses) -> None:
        """Write the file atomically."""
        endpoints = {"format": _FORMAT, "pid": os.getpid(), "grpc": where.grpc, "http": where.http}
        self._path.unlink(missing_ok=True)  # A process that was killed has left it.
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(endpoints))
            new.replace(self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


@contextlib.asynccontextmanager
async def _probing(
    service: Service, process: ProcessState, options: ServerOptions, where: Addresses
) -> AsyncIterator[None]:
    """Run the probe, if there is one, while the block runs."""
    if options.probe is None:
        yield
        return
    status = process.probe = ProbeStatus(probe_of(service.models.owners.me.name))
    consumers = asyncio.create_task(service.consumers.keep_probes(status, _SETTINGS))
    probe = await asyncio.to_thread(options.probe, where.grpc, status)
    try:
        yield
    finally:
        consumers.cancel()
        await asyncio.to_thread(probe.close)


@contextlib.asynccontextmanager
async def _among_others(service: Service, options: ServerOptions, where: Addresses) -> AsyncIterator[None]:
    """While the block runs, this process owns models together with those that share its log, if any do. At the end
    the others get its models.

    Raises:
        StorageFailed, ServiceUnavailable: brokers cannot be used.
    """
    shared, logs = options.shared, service.logs
    if shared is None or not isinstance(logs, JetStreamLogs):
        yield
        return
    from deltasync.cluster.nats_bucket import BucketOptions, NatsBucket

    brokers = shared.brokers
    client = await connect(brokers, shared.process)
    bucket = NatsBucket(client, BucketOptions(name=f"{brokers.prefix}_owners", replicas=brokers.replicas))
    hosting = service.hosting(logs)
    me = Member(
        shared.process,
        shared.grpc or where.grpc,
        shared.http or where.http,
        run=uuid.uuid4().hex,
        started=time.time_ns(),
    )
    owners = SharedOwners(shared.ownership, me, bucket, hosting, service.events)
    service.join(owners)
    try:
        await owners.start()
        looking = asyncio.create_task(service.repeat(hosting.look_after))
        try:
            yield
        finally:
            looking.cancel()
            await owners.close()
    finally:
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # The brokers may have gone before.
            await client.close()
