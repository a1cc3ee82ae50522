"""Where a service listens, what it starts with, and what it needs to be one of several processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deltasync.access.tls import TlsOptions
from deltasync.api.reload import Reader
from deltasync.base.addresses import listening_host
from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.cluster.member import OwnershipOptions
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.log.brokers import BrokerOptions
from deltasync.service.options import ServiceOptions
from deltasync.service.probe import ProbeStatus


@dataclass(frozen=True, kw_only=True)
class SharedLogOptions:
    """Which brokers keep the logs, and what this process is to the others.

    Attributes:
        brokers: that keep the logs.
        process: its name among the processes of the service.
        grpc: where others reach it by gRPC, HOST:PORT; empty is where it listens.
        http: where others reach it by HTTP, a URL; empty is where it listens.
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


class Probe(Protocol):
    """Probes a service until it is closed; that blocks."""

    def close(self) -> None:
        """End it."""


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
        roles: file that says who has which roles, see `access.roles`; None = anyone may publish, subscribe and
            read.
        insecure: listen on an address that others reach, whatever protects it.
        drain_seconds: how long open cuts may take to finish on SIGTERM.
        read_settings: reads what it takes of the configuration on SIGHUP; None where there is no file.
        tls: what TLS is spoken with on both ports; None = plain text.
        shared: brokers that keep the log, which other processes can go on with; None = it is this one's own.
        probe: begins to probe the service, by where it answers gRPC; None = nobody does.
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
    probe: "Callable[[str, ProbeStatus], Probe] | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", listening_host(self.host))
        if self.shared and not self.service.checkpoints:
            raise InvalidInput(
                "--log: give --checkpoints too, where another process finds a model that it takes over"
            )
