"""Lag: how far the replicas of a consumer are behind its model, and what is wrong with each. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.words import are, counted, duration, listed
from deltasync.consumers.consumer import Consumer, Replica, Rewind
from deltasync.consumers.registry import consumer_offset, offset_in
from deltasync.core.seal import Seal, event_time_of, seconds_behind, seconds_since_sealed
from deltasync.model.feed import Backlog, ReleaseStatistics, Standing, TableStanding

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
        versions: number of sealed versions that are newer than its rows.
        rows: upper bound for the number of its rows that differ from the model's.
        bytes: bytes of these rows' ids and values, as they are sent.
        seconds: age of the oldest version, or release, that it has not applied; 0 if there is none.
        unsent_norm: L2 norm of the model's rows less its rows, as of the last release. None if unknown: without a
            policy, or before it has applied the newest release.
        unsent_share: the same as a share of the norm of the tables.
        seconds_behind_events: age of the newest event that the model had been trained on at the version of its
            rows; 0 if that event is dated in the future. None if unknown.
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
    """How far one table of a consumer is behind; its oldest unsent row has been unsent for
    `oldest_row_seconds`.
    """

    table: str
    rows: int
    bytes: int
    oldest_row_seconds: float = 0.0
    unsent_norm: float | None = None
    unsent_share: float | None = None


@dataclass(frozen=True)
class RewindLag:
    """A replica came with rows of a discarded past: `held` is its version, or release, and `history` the history
    of that. For `seconds` the service has been replacing its rows.
    """

    held: int
    history: str
    seconds: float


@dataclass(frozen=True)
class ReplicaLag:
    """How far one replica is behind.

    Attributes:
        replica: its name.
        connected: whether it is connected.
        offset: the last version that it acknowledged; with a policy, the last release.
        lag: how far that is behind.
        seconds_since_ack: seconds since that acknowledgement; 0 if the service's clock was set back since.
        checked: whether that acknowledgement proved by checksums that it holds the right rows.
        damaged: tables whose rows differ from what it was sent; the service sends them again.
        unbound: tables that the consumer follows and that it does not hold.
        rewound: set if it came with rows of a discarded past, until they are replaced.
        since_seconds: seconds since it connected, or left; at most since the service started.
        left: why its last stream ended; empty if none has ended since the service started.
        unacked: number of releases that were sent to it and that it has not acknowledged.
        unacked_seconds: seconds since the first of these was sent; 0 if there is none.
        damages: how often its rows differed from what it was sent.
        damaged_seconds_ago: seconds since that last happened; None if it never did.
        behind: whether it lacks rows that were sent, or are about to be. Rows that a policy or a pause holds back
            do not count.
        waits_for: what keeps the service from sending it rows; empty if nothing does.
        state: the worst of this, in one word; "connected" and "guest" are not wrong.
        reason: everything that is wrong with it, in words; empty if nothing is.
        guest: whether it only looks. A guest counts neither in the consumer's offset, lag and state nor among its
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
    """What the newest release of a consumer with a policy sent, and what it left for later; norms are L2."""

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
    """Since when a consumer is paused (UTC), by whom, and why; `reason` may be empty. `otherwise` is its state
    without the pause.
    """

    since: str
    by: str
    reason: str
    otherwise: State


@dataclass(frozen=True)
class ConsumerLag:
    """How far a consumer's fleet is behind: as far as the last of its replicas.

    Without a policy `offset` is a version, and there is no `release`. With one it is the number of a release, and
    may be greater than the version of that release; `release` says what the newest one sent and left.
    `head_seconds_behind_events` is the age of the newest event at the head; its difference to
    `seconds_behind_events` is the time from the trainer to the replicas, the rest is the trainer's.
    `paused` says since when, by whom and why the consumer is paused; None if it is not.
    `damages` counts damaged tables of replicas since the service started.
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


def report(consumer: Consumer, standing: Standing, now_unix_ns: int) -> ConsumerLag:
    """How far a consumer is behind, per replica and per table.

    Args:
        consumer: the consumer; not changed meanwhile.
        standing: where its feed stands.
        now_unix_ns: the time, nanoseconds since 1970.
    """
    replicas = sorted(consumer.replicas.values(), key=lambda replica: replica.name)
    fleet = [replica for replica in replicas if not replica.guest]
    offset = consumer_offset(replicas, standing.history, standing.seal_of)
    offsets = [offset_in(standing.history, standing.seal_of, replica.applied) for replica in replicas]
    tables, seals = _tables(standing, replicas), standing.seals
    counts = {each: [table.lacking(each) for table in tables] for each in {offset, *offsets}}
    lags = {each: _lag(each, rows, tables, standing, now_unix_ns) for each, rows in counts.items()}
    state, reason = fleet_state(fleet, lags[offset], _with_unfit(standing, tables, consumer), offset)
    if unranked := consumer.policy.unranked([table.spec for table in tables]):
        reason = (
            f"{reason}; the policy cannot rank or quantise {listed(unranked, 3)}: no embedding tables, so all of "
            "their changed rows are sent"
        )
    if standing.trouble:
        reason = f"{reason}; the policy is not in force: {standing.trouble}"
    if standing.refused:
        reason = f"{reason}; the last cut was refused: {standing.refused}"
    if standing.unsaved:
        reason = f"{reason}; checkpoints fail: {standing.unsaved}"
    paused = None
    if pause := consumer.pause:  # Before all others: nothing is sent, whatever else is true.
        paused = PauseLag(pause.since, pause.by, pause.why, otherwise=state)
        state, reason = "paused", f"{pause.words}; otherwise {state}: {reason}"
    pairs = zip(tables, counts[offset], strict=True)
    lines = [_table_line(table, rows, standing, now_unix_ns) for table, rows in pairs]
    return ConsumerLag(
        consumer=consumer.name,
        model=consumer.model,
        history=standing.history,
        state=state,
        reason=reason,
        head=seals[-1].version if seals else 0,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        replicas=[
            _replica_lag(replica, each, lags[each], standing, now_unix_ns, held_back=bool(consumer.pause))
            for replica, each in zip(replicas, offsets, strict=True)
        ],
        tables=lines,
        oldest_row_seconds=max((line.oldest_row_seconds for line in lines), default=0.0),
        damages=consumer.damages,
        release=_release_lag(standing.release, standing.released, now_unix_ns) if standing.release else None,
        policy=consumer.policy.as_dict(),
        paused=paused,
        head_seconds_behind_events=seconds_behind(seals[-1].event_time_unix_ns, now_unix_ns) if seals else None,
    )


def _with_unfit(standing: Standing, tables: Sequence[TableStanding], consumer: Consumer) -> Standing:
    """The same standing; if the consumer follows no table, with the reason."""
    if tables or standing.unpublished:
        return standing
    patterns = ", ".join(consumer.policy.tables)
    return replace(standing, unfit=f"no table of model {consumer.model!r} fits {patterns}")


def _tables(standing: Standing, replicas: Sequence[Replica]) -> list[TableStanding]:
    """The tables; without their backlogs, if these are out of date."""
    tables = standing.tables()
    # The service makes no releases, and so compares no rows, while no replica is connected.
    if standing.compared or any(replica.stream for replica in replicas):
        return tables
    return [replace(table, backlog=None) for table in tables]


def _lag(offset: int, rows: Sequence[int], tables: Sequence[TableStanding], standing: Standing, now: int) -> Lag:
    version, oldest = standing.version_of(offset), _oldest_unapplied_version(offset, standing)
    lag = measure(version, standing.seals, [table.row_bytes for table in tables], rows, now, oldest)
    if lag.versions or lag.rows:
        lag = replace(lag, seconds=_seconds_since(version + 1 if oldest is None else oldest, standing, now))
    backlogs = [table.backlog for table in tables if table.backlog]
    if offset != standing.newest_release or len(backlogs) < len(tables):
        return lag
    norm, share = unsent(backlogs)
    return replace(lag, unsent_norm=norm, unsent_share=share)


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
        seals: the seals that are kept, oldest first; a version whose seal is gone counts as old as the oldest.
        row_bytes: bytes of a row of each table on the wire.
        lacking: number of rows of each table that the replica lacks.
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


def _oldest_unapplied_version(offset: int, standing: Standing) -> int | None:
    """The oldest version that a replica at `offset` has not applied; None = the one after that of its rows."""
    # The first release that it lacks may have been made at the same version.
    return None if standing.newest_release in (None, offset) else standing.version_of(offset)


def _seconds_since(version: int, standing: Standing, now: int) -> float:
    """Seconds since a version was sealed, even if the service's clock was set since."""
    steady = standing.seconds_since(version)
    return seconds_since_sealed(version, standing.seals, now) if steady is None else steady


def unsent(backlogs: Sequence[Backlog]) -> tuple[float, float]:
    """The L2 norm of the backlogs of some tables, and that as a share of the norm of the tables."""
    norm = math.hypot(*(each.amount.norm for each in backlogs))
    whole = math.hypot(*(each.table_norm for each in backlogs))
    return norm, norm / whole if whole else 0.0


def _table_line(table: TableStanding, rows: int, standing: Standing, now: int) -> TableLag:
    line = TableLag(table.name, rows, rows * table.row_bytes)
    if table.backlog is None:
        return line
    norm, share = unsent([table.backlog])
    oldest = _seconds_since(table.backlog.oldest_version, standing, now) if table.backlog.amount.rows else 0.0
    return replace(line, oldest_row_seconds=oldest, unsent_norm=norm, unsent_share=share)


def _release_lag(release: ReleaseStatistics, made: Moment | None, now: int) -> ReleaseLag:
    ago_ns = Moment(now, steady_ns()).after_ns(made or Moment(release.made_unix_ns))
    return ReleaseLag(
        number=release.number,
        version=release.version,
        seconds_ago=round(max(0, ago_ns) / 1e9, 3),
        rows=release.taken.rows,
        bytes=release.taken.bytes,
        norm=release.taken.norm,
        left_rows=release.backlog.rows,
        left_bytes=release.backlog.bytes,
        left_norm=release.backlog.norm,
        reason=release.reason,
    )


def fleet_state(replicas: Sequence[Replica], lag: Lag, standing: Standing, offset: int) -> tuple[State, str]:
    """How a fleet is doing, and why.

    Args:
        replicas: the fleet, without guests.
        lag: the lag of its last replica.
        standing: where its feed stands.
        offset: the offset of its last replica.
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
    state, reason = _holding(replicas, lag, standing, offset)
    return state, f"{reason}; away: {listed(away)}" if away else reason


def _holding(replicas: Sequence[Replica], lag: Lag, standing: Standing, offset: int) -> tuple[State, str]:
    """How much of the feed the replicas of a fleet hold, and whether they have proved it."""
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
        return "delivered", f"{_whole_fleet(replicas, 'has', 'have')} taken {newest}; {shown}{left}"
    return "in sync" if everything else "current", f"{_whole_fleet(replicas, 'holds', 'hold')} {newest}{left}"


def _offset(replica: Replica, standing: Standing) -> int:
    return offset_in(standing.history, standing.seal_of, replica.applied)


def _whole_fleet(replicas: Sequence[Replica], one: str, many: str) -> str:
    return f"all {len(replicas)} replicas {many}" if len(replicas) > 1 else f"the one replica {one}"


def _replica_lag(
    replica: Replica, offset: int, lag: Lag, standing: Standing, now: int, *, held_back: bool
) -> ReplicaLag:
    now_ns = steady_ns()
    since_ack_ns = now - replica.acked_unix_ns if replica.acked_ns is None else now_ns - replica.acked_ns
    line = ReplicaLag(
        replica=replica.name,
        connected=replica.stream is not None,
        offset=offset,
        lag=lag,
        seconds_since_ack=round(max(0, since_ack_ns) / 1e9, 3),
        checked=replica.checked,
        damaged=list(replica.damaged),
        unbound=list(replica.unbound),
        rewound=_rewound(replica.rewind, now_ns) if replica.rewind else None,
        since_seconds=round((now_ns - replica.since_ns) / 1e9, 3),
        left=replica.left,
        unacked=replica.unacked if replica.stream else 0,
        unacked_seconds=_ago(replica.unacked_ns, now_ns) if replica.stream and replica.unacked else 0.0,
        damages=replica.damages,
        damaged_seconds_ago=_ago(replica.damaged_ns, now_ns) if replica.damages else None,
        behind=lag.versions > 0 and offset != standing.newest_release and not held_back,
        waits_for=_waits_for(replica, standing, held_back=held_back),
        guest=replica.guest,
    )
    return replace(line, state=replica_state(line), reason=replica_reason(line))


def _waits_for(replica: Replica, standing: Standing, *, held_back: bool) -> str:
    """What keeps the service from sending rows to a replica; empty if nothing does."""
    newest = standing.newest_release
    if newest is None and standing.seals:
        newest = standing.seals[-1].version
    if replica.damaged and held_back and replica.sent_number != newest:
        return "the end of the pause"  # Only the newest release repairs it.
    return ""


def _rewound(rewind: Rewind, now_ns: int) -> RewindLag:
    return RewindLag(rewind.held.number, rewind.held.history, round((now_ns - rewind.since_ns) / 1e9, 3))


def _ago(then_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - then_ns) / 1e9, 3)


# Every replica lacks the newest version for a moment.
_LATE_SECONDS = 10.0


# A replica that acknowledges a release later than this is slow.
_SLOW_SECONDS = 2.0


# After this time without damage, earlier damage does not matter any more.
_AGAIN_SECONDS = 600.0


def replica_state(line: ReplicaLag) -> ReplicaState:
    """The worst that is wrong with a replica, in one word. A guest only looks: nobody relies on it."""
    if line.guest:
        return "guest"
    worst_first: dict[ReplicaState, bool] = {
        "away": not line.connected,
        "damaged": bool(line.damaged) or _damaged_again(line),
        "rewound": line.rewound is not None,
        "waiting": bool(line.waits_for),
        "late": line.behind and line.lag.seconds >= _LATE_SECONDS,
        "partial": bool(line.unbound),
    }
    return next((state for state, applies in worst_first.items() if applies), "connected")


def needs_somebody(line: ReplicaLag) -> bool:
    """Whether a replica needs an operator's attention."""
    return line.state not in ("connected", "guest")


def replica_reason(line: ReplicaLag) -> str:
    """What is wrong with a replica, in words; empty if nothing is, and for a guest: nobody relies on it."""
    if line.guest:
        return ""
    texts = []
    if not line.connected:
        texts.append(
            f"away for {duration(line.since_seconds)}: {line.left or 'not seen since the service started'}"
        )
    if line.damaged:
        texts.append(f"holds other rows than it was sent in {', '.join(line.damaged)}, which are to be sent again")
    if rewound := line.rewound:
        texts.append(f"came with {rewound.held} of a discarded past, {duration(rewound.seconds)} ago")
    if line.connected and line.behind:
        heard = f"last heard {duration(line.seconds_since_ack)} ago"
        texts.append(f"lacks {counted(line.lag.versions, 'version')}, {heard}{_slowness(line)}")
    if _damaged_again(line):
        times, ago = counted(line.damages, "time"), duration(line.damaged_seconds_ago or 0.0)
        texts.append(f"held other rows than it was sent {times}, last {ago} ago: something else writes to it")
    if line.waits_for:
        texts.append(f"waits for {line.waits_for}")
    if line.unbound:
        texts.append(f"does not hold {', '.join(line.unbound)}")
    if line.connected and not line.checked and not line.damaged:
        texts.append("has not shown by checksums what it holds")
    return "; ".join(texts)


def _slowness(line: ReplicaLag) -> str:
    """That a replica is slow, if rows that it lacks are under way to it; empty otherwise."""
    if line.unacked_seconds < _SLOW_SECONDS:
        return ""
    sent = f"{counted(line.unacked, 'release')} sent to it"
    return f"; {sent}, and not acknowledged for {duration(line.unacked_seconds)}: it is slow to take or apply them"


def _damaged_again(line: ReplicaLag) -> bool:
    ago = line.damaged_seconds_ago
    return line.damages > 1 and ago is not None and ago < _AGAIN_SECONDS
