"""What a process needs to own models on a log that others can go on with."""

from dataclasses import dataclass, field

from deltasync.core.errors import InvalidInput
from deltasync.core.names import check_name
from deltasync.ownership.options import OwnershipOptions
from deltasync.storage.brokers import BrokerOptions


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
