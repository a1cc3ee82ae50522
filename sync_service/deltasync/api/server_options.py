"""Where a service listens, and what it starts with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deltasync.api.reload import Reader
from deltasync.api.shared_options import SharedLogOptions
from deltasync.api.tls_options import TlsOptions
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.addresses import listening_host
from deltasync.core.errors import InvalidInput
from deltasync.core.probe_status import ProbeStatus
from deltasync.service.options import ServiceOptions


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
        roles: file that says who has which roles, see `core.roles`; None = anyone may publish, subscribe and read.
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
