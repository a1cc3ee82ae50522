"""Who owns a model: the one process of the service that takes its cuts and feeds its replicas."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """A process of the service, and what it owns of a model.

    Attributes:
        process: its name among the processes of the service.
        grpc: where it answers gRPC, HOST:PORT.
        http: where it answers HTTP, a URL.
        epoch: grows with every change of owners: of two, the later one counts.
        share: which share of the model's rows it owns, from 0.
        shares: how many there are: one, as long as a model is owned whole.
    """

    process: str
    grpc: str
    http: str
    epoch: int = 0
    share: int = 0
    shares: int = 1
