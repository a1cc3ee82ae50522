"""Lag: the distance from head to offset. Pure functions over what the service holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sync_service.consumers.consumer import Replica
from sync_service.log import Seal
from sync_service.tables import Table

State = Literal["in sync", "behind", "away", "empty"]


@dataclass(frozen=True)
class Lag:
    """How far an offset is behind the head.

    Attributes:
        versions: sealed versions after the offset.
        rows: rows that changed after the offset: what a release from there would hold.
        bytes: bytes of these rows' ids and values.
        seconds: age of the oldest version after the offset; 0 when there is none.
    """

    versions: int
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class TableLag:
    """How far one table of a consumer is behind."""

    table: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class ReplicaLag:
    """How far one replica is behind."""

    replica: str
    connected: bool
    offset: int
    lag: Lag
    seconds_since_ack: float


@dataclass(frozen=True)
class ConsumerLag:
    """How far a consumer's fleet is behind: as far as the last of its replicas."""

    consumer: str
    model: str
    history: str
    state: State
    reason: str
    head: int
    head_step: int
    offset: int
    lag: Lag
    replicas: list[ReplicaLag]
    tables: list[TableLag]


def measure(
    offset: int, seals: Sequence[Seal], tables: Sequence[Table], changed: Sequence[int], now_unix_ns: int
) -> Lag:
    """The lag of an offset.

    Args:
        offset: a version.
        seals: the kept seals, oldest first; where the one after `offset` is no longer kept, the lag in
            seconds is that of the oldest kept.
        tables: the model's tables.
        changed: how many rows of each table changed after `offset`.
        now_unix_ns: the time, nanoseconds since 1970.
    """
    head = seals[-1].version if seals else 0
    if head == offset:
        return Lag(0, 0, 0, 0.0)
    oldest_unsent = seals[max(0, offset + 1 - seals[0].version)]
    size = sum(rows * table.row_bytes for rows, table in zip(changed, tables, strict=True))
    seconds = max(0, now_unix_ns - oldest_unsent.sealed_unix_ns) / 1e9
    return Lag(head - offset, sum(changed), size, round(seconds, 3))


def state(replicas: Sequence[Replica], lag: Lag) -> tuple[State, str]:
    """How a fleet is doing, and why that is said."""
    away = [replica.name for replica in replicas if replica.stream is None]
    if not replicas:
        return "empty", "no replica has ever subscribed"
    if len(away) == len(replicas):
        return "away", f"none of {len(replicas)} replicas is connected"
    if lag.versions == 0:
        return "in sync", f"all {len(replicas)} replicas hold the newest version"
    reason = f"{lag.rows} rows of {lag.versions} versions are still to be applied by the last replica"
    return "behind", f"{reason}; away: {', '.join(away)}" if away else reason
