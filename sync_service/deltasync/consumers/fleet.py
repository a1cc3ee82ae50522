"""Decisions about offsets: pure functions."""

from collections.abc import Callable, Sequence

from deltasync.consumers.consumer import Replica
from deltasync.core.position import Decision, Position


def offset_in(history: str, seal_of: Callable[[int], int], position: Position) -> int:
    """The number of a position in `history`, where numbers have these seals (0 = not known); 0 if it is of another
    history, or of another past.
    """
    if position.history != history:
        return 0
    seal = seal_of(position.number) if position.seal else 0
    return position.number if seal in (0, position.seal) else 0


def consumer_offset(replicas: Sequence[Replica], history: str, seal_of: Callable[[int], int]) -> int:
    """What all of the fleet has: the lowest offset of its replicas, but for guests; 0 without replicas."""
    fleet = [replica for replica in replicas if not replica.guest]
    return min((offset_in(history, seal_of, replica.applied) for replica in fleet), default=0)


def forgettable(replicas: Sequence[Replica], now_ns: int, retention_ns: int) -> list[str]:
    """Replicas that have been away for longer than the retention; the last one of a fleet is kept.

    `now_ns` is by `steady_ns`: nobody is forgotten because a clock was set.
    """
    present = [replica for replica in replicas if replica.stream is not None and not replica.guest]
    away = [replica for replica in replicas if replica.stream is None]
    away.sort(key=lambda replica: (replica.since_ns, replica.acked_unix_ns))
    if not present:
        away = away[:-1]
    return [replica.name for replica in away if replica.since_ns < now_ns - retention_ns]


def may_leave(replica: Replica | None, instance: str) -> Decision:
    """Whether a replica of a name is forgotten once an instance of it says goodbye without a stream."""
    if replica is None:
        return Decision(False, "there is no replica of that name")
    if instance and instance == replica.instance:
        return Decision(True, "it has said goodbye")
    if instance and not replica.instance and not replica.stream and not replica.left:
        return Decision(True, "it has said goodbye, and none of its name has come since the service started")
    return Decision(False, "another replica of that name has come")
