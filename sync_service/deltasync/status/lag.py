"""Lag: how far replicas are behind the model. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deltasync.base.words import are, counted, listed
from deltasync.consumers.consumer import Replica
from deltasync.consumers.registry import offset_in
from deltasync.core.seal import Seal, event_time_of, seconds_behind, seconds_since_sealed
from deltasync.model.feed import Backlog, Standing

State = Literal[
    "in sync",
    "current",
    "delivered",
    "partial",
    "behind",
    "waiting",
    "damaged",
    "failed",
    "away",
    "empty",
    "paused",
]
ReplicaState = Literal["connected", "guest", "partial", "late", "waiting", "rewound", "damaged", "away"]


@dataclass(frozen=True)
class Lag:
    """How far a replica at some offset is behind the model.

    Attributes:
        versions: sealed versions that are newer than the rows it holds.
        rows: rows that it does not hold as the model has them, at most.
        bytes: bytes of these rows' ids and values, as they are sent.
        seconds: age of the oldest version, or release, that it has not applied; 0 when there is none.
        unsent_norm: L2 norm of what the model has less what it holds, as of the last release. None where it is not
            known: without a policy, or before it has applied the newest release.
        unsent_share: the same as a share of the norm of the tables.
        seconds_behind_events: age of the newest event that the model had been trained on at the version whose rows
            it holds; 0 if that is dated in the future. None where it is not known.
    """

    versions: int
    rows: int
    bytes: int
    seconds: float
    unsent_norm: float | None = None
    unsent_share: float | None = None
    seconds_behind_events: float | None = None


@dataclass(frozen=True, slots=True)
class TableLag:
    """How far one table of a consumer is behind; its oldest dirty row is dirty for `oldest_row_seconds`."""

    table: str
    rows: int
    bytes: int
    oldest_row_seconds: float = 0.0
    unsent_norm: float | None = None
    unsent_share: float | None = None


@dataclass(frozen=True)
class RewindLag:
    """That a replica has rows of a discarded past: the version, or release, of which history it came with, and for
    how long it has been given what there is instead.
    """

    held: int
    history: str
    seconds: float


@dataclass(frozen=True)
class ReplicaLag:
    """How far one replica is behind.

    Attributes:
        replica: its name.
        connected: whether it is there.
        offset: the version that it has acknowledged last or, of a consumer with a policy, the release.
        lag: how far that is behind.
        seconds_since_ack: when it last said so; 0 if the service's clock was set back since.
        checked: whether it then showed by checksums that it holds the right rows.
        damaged: tables of which it holds other rows than it was sent; these are to be sent to it again.
        unbound: tables that the consumer follows and that it does not hold.
        rewound: where it came with rows of a discarded past, until it holds others.
        since_seconds: for how long it has been connected, or away; at most since the service started.
        left: why its last stream ended; empty where it has had none since.
        unacked: how many releases were sent to it that it has not acknowledged.
        unacked_seconds: how long ago the first of these was; 0 if there is none.
        damages: how often it was found to hold other rows than it was sent.
        damaged_seconds_ago: when that was last; None if it never was.
        behind: whether it lacks something that was sent, or is to be: what a policy or a pause holds back is not.
        waits_for: what keeps the service from sending it what it should have: room on disk or, where it is
            damaged, a pause; empty if nothing does.
        state: the worst of this, in one word; "connected" and "guest" are not wrong.
        reason: all of this that is wrong, in words; empty if nothing is.
        guest: whether it only looks, and counts neither in the consumer's offset, lag and state nor among its
            replicas.
    """

    replica: str
    connected: bool
    offset: int
    lag: Lag
    seconds_since_ack: float
    checked: bool
    damaged: list[str]
    unbound: list[str]
    rewound: RewindLag | None = None
    since_seconds: float = 0.0
    left: str = ""
    unacked: int = 0
    unacked_seconds: float = 0.0
    damages: int = 0
    damaged_seconds_ago: float | None = None
    behind: bool = False
    waits_for: str = ""
    state: ReplicaState = "connected"
    reason: str = ""
    guest: bool = False


@dataclass(frozen=True)
class ReleaseLag:
    """What the newest release of a consumer with a policy took and left; norms are L2."""

    number: int
    version: int
    seconds_ago: float
    rows: int
    bytes: int
    norm: float
    left_rows: int
    left_bytes: int
    left_norm: float
    reason: str


@dataclass(frozen=True)
class PauseLag:
    """Since when a consumer is paused (UTC), by whom, and why; `reason` may be empty. `otherwise` is the state in
    which it would be if it were not.
    """

    since: str
    by: str
    reason: str
    otherwise: State


@dataclass(frozen=True)
class ConsumerLag:
    """How far a consumer's fleet is behind: as far as the last of its replicas.

    Without a policy `offset` is a version, and there is no `release`. With one it is the number of a release, and
    may be greater than the version of that release; `release` says what the newest one took and left.
    `head_seconds_behind_events` is to the head what `seconds_behind_events` is to what replicas hold: what lies
    between the two is the way from the trainer to them, the rest is the trainer's.
    `paused` says since when, by whom and why it is; None if it is not.
    `damages` is how often a table of a replica was found to be damaged since the service started.
    """

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
    oldest_row_seconds: float
    damages: int
    release: ReleaseLag | None
    policy: dict[str, Any]
    head_seconds_behind_events: float | None = None
    paused: PauseLag | None = None

    @property
    def fleet(self) -> list[ReplicaLag]:
        """The replicas that count: all but guests."""
        return [replica for replica in self.replicas if not replica.guest]


def measure(
    version: int,
    seals: Sequence[Seal],
    row_bytes: Sequence[int],
    lacking: Sequence[int],
    now_unix_ns: int,
    since: int | None = None,
) -> Lag:
    """The lag of a replica that holds the rows of `version`.

    Args:
        version: a version.
        seals: the seals there still are, oldest first; a version whose seal is gone counts as old as the oldest.
        row_bytes: what a row of each table takes on the wire.
        lacking: how many rows of each table the replica does not hold as the model has them.
        now_unix_ns: the time, nanoseconds since 1970.
        since: the oldest version that it has not applied; None = the one after `version`.
    """
    newest = seals[-1].version if seals else 0
    oldest = version + 1 if since is None else since
    behind_events = seconds_behind(event_time_of(version, seals), now_unix_ns)
    if newest <= version and not sum(lacking):
        return Lag(0, 0, 0, 0.0, seconds_behind_events=behind_events)
    size = sum(rows * each for rows, each in zip(lacking, row_bytes, strict=True))
    seconds = seconds_since_sealed(oldest, seals, now_unix_ns)
    return Lag(max(0, newest - version), sum(lacking), size, seconds, seconds_behind_events=behind_events)


def unsent(backlogs: Sequence[Backlog]) -> tuple[float, float]:
    """The L2 norm of what is left of some tables for later, and that as a share of the norm of the tables."""
    norm = math.hypot(*(each.amount.norm for each in backlogs))
    whole = math.hypot(*(each.table_norm for each in backlogs))
    return norm, norm / whole if whole else 0.0


def state(replicas: Sequence[Replica], lag: Lag, standing: Standing, offset: int) -> tuple[State, str]:
    """How a fleet is doing, and why.

    Args:
        replicas: all of it; guests are none of it.
        lag: that of the last of them.
        standing: where its feed stands.
        offset: what all of them hold.
    """
    away = [replica.name for replica in replicas if replica.stream is None]
    if not replicas:
        text = standing.unpublished or "no replica subscribes, or is expected back"
        return "empty", f"{text}; {standing.failure}" if standing.failure else text
    if standing.failure:
        return "failed", standing.failure
    if standing.unpublished:
        return "empty", standing.unpublished
    if len(away) == len(replicas):
        return "away", f"none of {counted(len(replicas), 'replica')} is connected"
    if damaged := [replica for replica in replicas if replica.damaged]:
        names = ", ".join(f"{replica.name} ({', '.join(replica.damaged)})" for replica in damaged)
        return "damaged", f"other rows than were sent, which are to be sent again, in {names}"
    if standing.unfit:
        return "waiting", standing.unfit
    found, reason = _held(replicas, lag, standing, offset)
    return found, f"{reason}; away: {listed(away)}" if away else reason


def _held(replicas: Sequence[Replica], lag: Lag, standing: Standing, offset: int) -> tuple[State, str]:
    """How much of what there is the replicas of a fleet hold, and how well that is known."""
    if rewound := [f"{each.name} (held {each.rewind.held.number})" for each in replicas if each.rewind]:
        return "behind", f"rows of a past that was discarded are being replaced in {', '.join(rewound)}"
    everything = lag.versions == 0 and lag.rows == 0
    # Before the first release nobody holds it.
    if not everything and not (standing.newest_release and offset == standing.newest_release):
        last = listed(each.name for each in replicas if _offset(each, standing) <= offset)
        # A release may be made later of the version that is there.
        source = counted(lag.versions, "version") if lag.versions else "a release"
        lacking = f"{counted(lag.rows, 'row')} of {source}"
        left = f"still to be applied by {last}: {lacking}"
        return "behind", left
    newest = "the newest version" if everything else "the newest release"
    left = "" if everything else f"; {are(lag.rows, 'row')} left for later"
    if partial := [f"{each.name} lacks {', '.join(each.unbound)}" for each in replicas if each.unbound]:
        return "partial", f"of {newest} some replicas follow only a part: {'; '.join(partial)}{left}"
    if unchecked := [each.name for each in replicas if not each.checked]:
        shown = f"no checksums show yet what is held by {', '.join(unchecked)}"
        return "delivered", f"{_all(replicas, 'has', 'have')} taken {newest}; {shown}{left}"
    return "in sync" if everything else "current", f"{_all(replicas, 'holds', 'hold')} {newest}{left}"


def _offset(replica: Replica, standing: Standing) -> int:
    return offset_in(standing.history, standing.seal_of, replica.applied)


def _all(replicas: Sequence[Replica], one: str, many: str) -> str:
    return f"all {len(replicas)} replicas {many}" if len(replicas) > 1 else f"the one replica {one}"
