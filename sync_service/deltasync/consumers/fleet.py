"""Decisions about offsets: pure functions."""

from collections.abc import Sequence

from deltasync.consumers.consumer import Replica
from deltasync.core.position import Position


def offset_in(history: str, position: Position) -> int:
    """The number of a position in `history`; 0 if it belongs to another history."""
    return position.number if position.history == history else 0


def consumer_offset(replicas: Sequence[Replica], history: str) -> int:
    """What all of the fleet has: the lowest offset of its replicas; 0 without replicas."""
    return min((offset_in(history, replica.applied) for replica in replicas), default=0)


def forgettable(replicas: Sequence[Replica], now_unix_ns: int, retention_ns: int) -> list[str]:
    """Replicas that have been away for longer than the retention; the last one of a fleet is kept."""
    present = [replica for replica in replicas if replica.stream is not None]
    away = [replica for replica in replicas if replica.stream is None]
    away.sort(key=lambda replica: (replica.away_since_unix_ns, replica.acked_unix_ns))
    if not present:
        away = away[:-1]
    return [replica.name for replica in away if replica.away_since_unix_ns < now_unix_ns - retention_ns]
