"""What is wrong with one replica: in a word, and in a sentence. Pure functions."""

from deltasync.core.words import counted, duration
from deltasync.status.lag import ReplicaLag, ReplicaState

# Each replica lacks the newest version for a moment.
_LATE_SECONDS = 10.0
# A release that is acknowledged later than this is told of; and for so long that a replica was damaged again.
_SLOW_SECONDS, _AGAIN_SECONDS = 2.0, 600.0


def replica_state(line: ReplicaLag) -> ReplicaState:
    """The worst that is to be said of a replica. A guest only looks: nobody counts on it."""
    if line.guest:
        return "guest"
    found: dict[ReplicaState, bool] = {
        "away": not line.connected,
        "damaged": bool(line.damaged) or _damaged_again(line),
        "rewound": line.rewound is not None,
        "waiting": bool(line.waits_for),
        "late": line.behind and line.lag.seconds >= _LATE_SECONDS,
        "partial": bool(line.unbound),
    }
    return next((state for state, holds in found.items() if holds), "connected")


def needs_somebody(line: ReplicaLag) -> bool:
    """Whether an operator should know of a replica."""
    return line.state not in ("connected", "guest")


def replica_reason(line: ReplicaLag) -> str:
    """What is wrong with a replica, in words; empty if nothing is, and of a guest: nobody counts on that."""
    if line.guest:
        return ""
    found = []
    if not line.connected:
        found.append(
            f"away for {duration(line.since_seconds)}: {line.left or 'not seen since the service started'}"
        )
    if line.damaged:
        found.append(f"holds other rows than it was sent in {', '.join(line.damaged)}, which are to be sent again")
    if held := line.rewound:
        found.append(f"came with {held.held} of a discarded past, {duration(held.seconds)} ago")
    if line.connected and line.behind:
        heard = f"last heard {duration(line.seconds_since_ack)} ago"
        found.append(f"lacks {counted(line.lag.versions, 'version')}, {heard}{_slowness(line)}")
    if _damaged_again(line):
        times, ago = counted(line.damages, "time"), duration(line.damaged_seconds_ago or 0.0)
        found.append(f"held other rows than it was sent {times}, last {ago} ago: something else writes to it")
    if line.waits_for:
        found.append(f"waits for {line.waits_for}")
    if line.unbound:
        found.append(f"does not hold {', '.join(line.unbound)}")
    if line.connected and not line.checked and not line.damaged:
        found.append("has not shown by checksums what it holds")
    return "; ".join(found)


def _slowness(line: ReplicaLag) -> str:
    """Whether what a replica lacks is under way to it."""
    if line.unacked_seconds < _SLOW_SECONDS:
        return ""
    sent = f"{counted(line.unacked, 'release')} sent to it"
    return f"; {sent}, and not acknowledged for {duration(line.unacked_seconds)}: it is slow to take or apply them"


def _damaged_again(line: ReplicaLag) -> bool:
    ago = line.damaged_seconds_ago
    return line.damages > 1 and ago is not None and ago < _AGAIN_SECONDS
