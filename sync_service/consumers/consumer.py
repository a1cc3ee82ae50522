"""What a consumer and a replica of it are."""

import asyncio
from dataclasses import dataclass, field

from sync_service.tables import Position


@dataclass
class Replica:
    """One process of a consumer's fleet.

    Attributes:
        name: its name inside the fleet.
        applied: the last position it has acknowledged.
        acked_unix_ns: when it last acknowledged, nanoseconds since 1970.
        stream: ends its open stream when set; None while it is away.
        away_since_unix_ns: when its last stream ended, or the service started without it.
    """

    name: str
    applied: Position = field(default_factory=Position)
    acked_unix_ns: int = 0
    stream: asyncio.Event | None = None
    away_since_unix_ns: int = 0


@dataclass
class Consumer:
    """A named subscription to a model."""

    name: str
    model: str
    created_unix_ns: int
    replicas: dict[str, Replica] = field(default_factory=dict)
    released_rows: int = 0
    released_bytes: int = 0
