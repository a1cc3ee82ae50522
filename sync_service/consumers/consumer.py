"""What a consumer and a replica of it are."""

from dataclasses import dataclass, field

from sync_service.tables import Position


@dataclass
class Replica:
    """One process of a consumer's fleet.

    Attributes:
        name: its name inside the fleet.
        applied: the last position it has acknowledged.
        acked_unix_ns: when it last acknowledged, nanoseconds since 1970.
        stream: what stands for its open stream; None while it is away.
    """

    name: str
    applied: Position = field(default_factory=Position)
    acked_unix_ns: int = 0
    stream: object | None = None


@dataclass
class Consumer:
    """A named subscription to a model."""

    name: str
    model: str
    created_unix_ns: int
    replicas: dict[str, Replica] = field(default_factory=dict)
    released_rows: int = 0
    released_bytes: int = 0
