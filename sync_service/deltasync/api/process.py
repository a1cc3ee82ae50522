"""The service process: gRPC and HTTP in one event loop, from recovery to shutdown."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import numba  # noqa: F401  # must be imported before `spare_imports` runs
import uvicorn
from fastapi import FastAPI

from deltasync.access.audit import Audit
from deltasync.access.limits import Limits
from deltasync.access.rights import Access, RolesFile
from deltasync.access.roles import checked_token
from deltasync.access.tls import CertificateFiles, TlsOptions
from deltasync.api.application import create_app
from deltasync.api.grpc_server import bind_grpc, not_bound
from deltasync.api.http_server import HttpListener, HttpProtocol, end_silent
from deltasync.api.operation_routes import Collaborators
from deltasync.api.publish import PublishServicer
from deltasync.api.subscribe import StreamCollaborators, SubscribeServicer
from deltasync.base.addresses import may_listen, with_port
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.logs import Progress
from deltasync.base.process import (
    built_commit,
    keep_freed_memory,
    listening_socket,
    raise_descriptor_limit,
    spare_imports,
    write_no_core,
)
from deltasync.base.settings import changed
from deltasync.base.threads import in_own_thread
from deltasync.cluster.bucket import ClusterOptions, Member
from deltasync.cluster.owners import Owners
from deltasync.cluster.shared_owners import SharedOwners
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.kernels.compiled import imported_kernels, keep_in
from deltasync.log.brokers import BrokerOptions, connect
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.log.volume import refused
from deltasync.service.consumers import Consumers, ProbeStatus, probe_of
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.answers import Sampler
from deltasync.status.process import ProcessState, Sources

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The author of consumers that the settings create.
_SETTINGS = "the service's settings"


class Closable(Protocol):
    """Something that runs until it is closed."""

    def close(self) -> None:
        """Stop; blocks."""


# Reads all settings again. Blocks, and raises InvalidInput if they are wrong.
Reader = Callable[[], ServiceOptions]
# Reloads the roles file. Raises nothing.
RolesReload = Callable[[], Awaitable[None]]
# Model and policy by consumer.
Policies = Mapping[str, tuple[str, Policy]]
# Starts a probe, given the gRPC address and the status to update.
StartProbe = Callable[[str, ProbeStatus], Closable]


@dataclass(frozen=True)
class Addresses:
    """Where the service listens: HOST:PORT for gRPC, a URL for HTTP."""

    grpc: str
    http: str


async def serve(
    options: ServiceOptions, read: Reader | None = None, start_probe: StartProbe | None = None
) -> None:
    """Run the service until SIGTERM or SIGINT, and reload roles, consumers and limits on SIGHUP.

    `read` reads the settings again; None = there is no configuration file.
    """
    write_no_core()
    keep_freed_memory()
    spare_imports()
    files = raise_descriptor_limit()
    os.umask(0o077)  # Only the service's own user may read a model's rows.
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    reloading = asyncio.Event()
    _on_hangup(asyncio.get_running_loop(), reloading.set)
    again = (lambda: _within(read(), files)) if read else None
    await run(_within(options, files), stopping, reloading, again, start_probe)


def _on_hangup(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    """Call a function in the loop on SIGHUP.

    Unlike a handler of the loop, this one survives the loop, so that a late signal does not end the process.
    """

    def hang_up(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(do)

    signal.signal(signal.SIGHUP, hang_up)


def _within(options: ServiceOptions, files: int) -> ServiceOptions:
    """Limit connections to the process's file descriptors.

    Otherwise a peer with many connections could use up the descriptors for the service's own files.
    """
    limits = options.limits.within(files)
    if limits != options.limits:
        logger.warning(
            "this process may open only %d files, so http_connections and grpc_connections become %d and %d; "
            "raise the limit on open files (ulimit -n)",
            files,
            limits.http_connections,
            limits.grpc_connections,
        )
    return replace(options, limits=limits)


async def run(
    options: ServiceOptions,
    stopping: asyncio.Event,
    reloading: asyncio.Event | None = None,
    read: Reader | None = None,
    start_probe: StartProbe | None = None,
    make: Callable[..., Service] = Service,
) -> None:
    """Run the service until `stopping` is set; whenever `reloading` is set, reload roles, consumers and limits."""
    exposure, admin_token = _checked_exposure(options), _admin_token(options)
    roles = RolesFile(options.roles) if options.roles else None
    certificates = None
    if options.tls_cert and options.tls_key:
        files = TlsOptions(cert=options.tls_cert, key=options.tls_key, client_ca=options.tls_client_ca)
        certificates = CertificateFiles(files, options.look_seconds)
    logs = await open_logs(options, options.brokers) if options.brokers else None
    async with asyncio.TaskGroup() as tasks:
        service = make(options, tasks, logs)
        process = ProcessState(draining=service.draining)
        keep_in(options.data_dir / "kernels")
        recovery, also = asyncio.create_task(service.recovery.all()), list[asyncio.Task[None]]()
        try:
            await service.consumers.configure(options.consumers, _SETTINGS)
            await asyncio.wait({recovery}, timeout=options.early_seconds)
            if recovery.done():  # Raise a failure before listening.
                await recovery
            access = Access(admin_token, roles.roles if roles else None, Audit(service.events))
            access.exposure = exposure
            also += [tasks.create_task(each.run()) for each in (service, service.checkpoints, service.versions)]
            if roles:
                also.append(tasks.create_task(roles.follow(access, service.events)))
            if certificates:
                also.append(tasks.create_task(certificates.follow(service.events, process.certificates_expire)))
            reload_roles = partial(roles.reload, access, service.events) if roles else None
            hung_up = reloading or asyncio.Event()
            reload = Reload(options, service.consumers, service.registry, service.limits, service.events)
            also.append(tasks.create_task(reload.run(hung_up, read, reload_roles)))
            await _listen(service, process, start_probe, tasks, stopping, recovery, access, certificates)
        finally:
            service.draining.set()
            for each in (recovery, *also):
                each.cancel()
            await asyncio.wait([recovery, *also])  # Their threads may still write to the data directory.
            await service.drain()
    logger.info("stopped")


def _checked_exposure(options: ServiceOptions) -> str:
    """Log and return a warning about the listening address; empty if it is safe."""
    tls, roles = options.tls_cert is not None, options.roles is not None
    decision = may_listen(options.host, tls=tls, roles=roles, insecure=options.insecure)
    if not decision.yes:
        raise InvalidInput(decision.reason)
    if decision.reason:
        logger.warning("%s", decision.reason)
    return decision.reason


async def open_logs(options: ServiceOptions, brokers: BrokerOptions) -> JetStreamLogs:
    """Open the shared logs, unless the brokers could lose acknowledged data and nobody accepts that."""
    if (own := options.data_dir / "log" / "data.mdb").exists():
        raise InvalidInput(
            f"{options.data_dir} belongs to a service with a private log, {own}; with a shared log, this process "
            "would remove its checkpoints; give another --data-dir"
        )
    logs = await in_own_thread(JetStreamLogs, brokers, options.process)
    try:
        logs.accepted_risks = await in_own_thread(logs.risks)
        if logs.accepted_risks and not options.accept_log_risk:
            raise InvalidInput(f"{'; '.join(logs.accepted_risks)}; fix this, or accept it with --accept-log-risk")
    except BaseException:
        await in_own_thread(logs.close)
        raise
    for risk in logs.accepted_risks:
        logger.warning("accepted risk: %s", risk)
    return logs


def _admin_token(options: ServiceOptions) -> str | None:
    path, token = options.admin_token_file, options.admin_token
    if path is None:
        return checked_token("DELTASYNC_ADMIN_TOKEN or admin_token", token) if token else None
    try:
        return checked_token(f"--admin-token-file {path}", path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--admin-token-file {path}: {getattr(error, 'strerror', 'not text')}") from error


def sources_of(service: Service, process: ProcessState) -> Sources:
    """The parts of a service that status reads."""
    return _parts(Sources, service, process=process)


def routes_of(service: Service) -> Collaborators:
    """The parts of a service that its routes use."""
    return _parts(Collaborators, service)


def streams_of(service: Service) -> StreamCollaborators:
    """The parts of a service that replicas' streams use."""
    return _parts(StreamCollaborators, service)


def _parts(kind: type[T], service: Service, **others: object) -> T:
    """The fields of a class that are attributes of a service, and others."""
    names = [each.name for each in fields(cast("type[Any]", kind)) if each.name not in others]
    return kind(**{name: getattr(service, name) for name in names}, **others)


async def _listen(
    service: Service,
    process: ProcessState,
    start_probe: StartProbe | None,
    tasks: asyncio.TaskGroup,
    stopping: asyncio.Event,
    recovery: asyncio.Task[None],
    access: Access,
    certificates: CertificateFiles | None,
) -> None:
    options = service.options
    listener = HttpListener(_bind(options.host, options.http_port), service.limits)
    publisher = PublishServicer(service.publishing, service.limits, service.events, options.silence_seconds)
    subscriber = SubscribeServicer(streams_of(service))
    server = bind_grpc(
        publisher, subscriber, service.limits, options.host, options.grpc_port, access, certificates
    )
    endpoints = EndpointsFile(options.data_dir, service.events)
    sampler = Sampler(sources_of(service, process), service.events, access, options.metrics_seconds)
    sampling = tasks.create_task(sampler.run())
    await in_own_thread(built_commit)  # Read now, as a checkout may change while the service runs.
    app = create_app(routes_of(service), access, sampler)
    http = _Http(_http_config(app, certificates))
    http_task = tasks.create_task(http.serve(sockets=[listener]))
    silence = tasks.create_task(end_silent(http.server_state.connections, service.limits))
    try:
        await _compile(process, stopping)
        await server.server.start()
        scheme = "https" if certificates else "http"
        http_address = with_port(options.host, listener.getsockname()[1])
        where = Addresses(with_port(options.host, server.port), f"{scheme}://{http_address}")
        if options.brokers is None:
            service.join(Owners(Member("", where.grpc, where.http)))
        logger.info("listening: grpc=%s http=%s data=%s", where.grpc, where.http, options.data_dir)
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({stopped, recovery}, return_when=asyncio.FIRST_COMPLETED)
        if recovery.done() and not recovery.exception():
            async with _among_others(service, where):
                server.health.set(serving=True)
                await endpoints.announce(where, stopped)
                async with _probing(service, process, start_probe, where):
                    await stopped
                    server.health.set(serving=False)
    finally:
        logger.info("shutting down")
        server.health.set(serving=False)
        service.draining.set()
        await service.wait_idle(options.drain_seconds)
        await server.server.stop(grace=1.0)
        http.should_exit = True
        await asyncio.wait([http_task])
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
        ssl_context_factory=certificates.http_context if certificates else None,
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ServiceUnavailable(not_bound("--http-port", host, port, error)) from error


async def _compile(process: ProcessState, stopping: asyncio.Event) -> None:
    """Compile all kernels in advance, as cuts must not wait for a compiler. Stops early at shutdown."""
    kernels = imported_kernels()
    progress = Progress("compiling for this machine, once", len(kernels), "kernels")
    process.compiling = True
    for each in kernels:
        if not stopping.is_set():
            await in_own_thread(each.compile)
            progress.add(1)
    process.compiling = False


# The format of endpoints.json.
_FORMAT = 1
# Pause between attempts to write it.
_AGAIN_SECONDS = 1.0


class EndpointsFile:
    """`endpoints.json` in a data directory, present while the service listens."""

    def __init__(self, data_dir: Path, events: Events) -> None:
        self._path = data_dir / "endpoints.json"
        self._events = events

    async def announce(self, where: Addresses, stopped: asyncio.Task[Literal[True]]) -> None:
        """Write the addresses. If this fails, keep trying while the service runs."""
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
        """Remove the file. On a volume that refuses writes it stays until the next start."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            refusal = refused(f"{self._path} cannot be removed", self._path, error)
            self._events.emit(EventKind.FAILED, error=refusal)

    def _write(self, where: Addresses) -> None:
        """Write the file atomically."""
        endpoints = {"format": _FORMAT, "pid": os.getpid(), "grpc": where.grpc, "http": where.http}
        self._path.unlink(missing_ok=True)  # Left by a killed process.
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(endpoints))
            new.replace(self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


@contextlib.asynccontextmanager
async def _probing(
    service: Service, process: ProcessState, start_probe: StartProbe | None, where: Addresses
) -> AsyncIterator[None]:
    """Run the probe, if any, during the block."""
    if start_probe is None:
        yield
        return
    status = process.probe = ProbeStatus(probe_of(service.models.owners.me.name))
    consumers = asyncio.create_task(service.consumers.keep_probes(status, _SETTINGS))
    probe = await in_own_thread(start_probe, where.grpc, status)
    try:
        yield
    finally:
        consumers.cancel()
        await in_own_thread(probe.close)


@contextlib.asynccontextmanager
async def _among_others(service: Service, where: Addresses) -> AsyncIterator[None]:
    """Take part in the cluster during the block, if the log is shared; hand the models over at the end."""
    options, logs = service.options, service.logs
    if (brokers := options.brokers) is None or not isinstance(logs, JetStreamLogs):
        yield
        return
    from deltasync.cluster.nats_bucket import NatsBucket

    client = await connect(brokers, options.process)
    bucket = NatsBucket(client, f"{brokers.prefix}_owners", replicas=brokers.replicas)
    hosting = service.hosting(logs)
    me = Member(
        options.process,
        options.advertise_grpc or where.grpc,
        options.advertise_http or where.http,
        run=uuid.uuid4().hex,
        started=time.time_ns(),
    )
    owners = SharedOwners(ClusterOptions(lease_seconds=options.lease_seconds), me, bucket, hosting, service.events)
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
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # The brokers may already be gone.
            await client.close()


_BY = "SIGHUP"


class Reload:
    """Applies a changed configuration. For the event loop."""

    def __init__(
        self,
        options: ServiceOptions,
        consumers: Consumers,
        registry: ConsumerRegistry,
        limits: Limits,
        events: Events,
    ) -> None:
        self._options = options
        self._consumers, self._registry, self._limits, self._events = consumers, registry, limits, events

    async def run(
        self, hung_up: asyncio.Event, read: Reader | None, reload_roles: RolesReload | None = None
    ) -> None:
        """Reload roles and configuration whenever `hung_up` is set, until cancelled. Survives all errors."""
        while True:
            await hung_up.wait()
            hung_up.clear()
            if reload_roles:
                await reload_roles()
            if read is None:
                text = "no configuration file; start the service with --config to reload consumers and limits"
                self._events.emit(EventKind.CONFIGURATION_RELOADED, text)
                continue
            try:
                reloaded = await in_own_thread(read)
            except DeltasyncError as error:
                self._events.emit(EventKind.CONFIGURATION_REFUSED, "nothing changed", error)
            except Exception as error:  # noqa: BLE001  # must not end the service
                self._events.emit(EventKind.FAILED, "cannot read the configuration", error)
            else:
                await self._configure(reloaded)

    async def _configure(self, settings: ServiceOptions) -> None:
        options, limits = settings.consumers, self._limits.take(settings.limits)
        _, later = changed(self._options, settings)
        before, failure = self._policies(), None
        try:
            await self._consumers.configure(options, _BY)
        except Exception as error:  # noqa: BLE001  # must not end the service
            failure = error
        consumers = outcome(before, self._policies(), options, self._consumers.shortcomings)
        restart = f"after the next start: {', '.join(later)}" if later else ""
        text = "; ".join(filter(None, [limits, consumers, restart]))
        if failure:
            self._events.emit(EventKind.FAILED, f"only part of the configuration was applied: {text}", failure)
        else:
            self._events.emit(EventKind.CONFIGURATION_RELOADED, text)

    def _policies(self) -> Policies:
        return {name: (each.model, each.policy) for name, each in self._registry.consumers.items()}


def outcome(
    before: Policies, after: Policies, configured: Sequence[ConsumerOptions], refused: Mapping[str, str]
) -> str:
    """Describe the changes made by a configuration."""
    names = [each.name for each in configured]
    names_by_outcome = {
        "created": [name for name in names if name in after and name not in before],
        "changed": [name for name in names if name in before and after.get(name) != before[name]],
        "unchanged": [name for name in names if after.get(name) == before.get(name) and name not in refused],
        "refused": [name for name in names if name in refused],
        "not in the configuration and unchanged": sorted(after.keys() - names),
    }
    words = "; ".join(f"{what}: {', '.join(some)}" for what, some in names_by_outcome.items() if some)
    return words or "no consumers"
