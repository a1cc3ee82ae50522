"""The lag and state of a consumer and its replicas. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import replace

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.words import are, counted, duration, listed, utc
from deltasync.consumers.consumer import Consumer, Replica, Rewind
from deltasync.consumers.registry import consumer_offset, offset_in
from deltasync.core.cut_times import DeliveryDurations
from deltasync.core.seal import Seal, event_time_of, seconds_behind, seconds_since_sealed
from deltasync.model.feed import Backlog, FeedStatus, ReleaseStatistics, TableStatus
from deltasync.status.records import (
    ConsumerStatus,
    Freshness,
    Lag,
    PauseStatus,
    ReleaseLag,
    ReplicaState,
    ReplicaStatus,
    RewindLag,
    State,
    TableLag,
)


def report(consumer: Consumer, status: FeedStatus, now_unix_ns: int) -> ConsumerStatus:
    """Compute a consumer's lag, per replica and per table."""
    replicas = sorted(consumer.replicas.values(), key=lambda replica: replica.name)
    fleet = [replica for replica in replicas if not replica.guest]
    offset = consumer_offset(replicas, status.history, status.seal_of)
    offsets = [offset_in(status.history, status.seal_of, replica.applied) for replica in replicas]
    tables, seals = _tables(status, replicas), status.seals
    counts = {each: [table.lacking(each) for table in tables] for each in {offset, *offsets}}
    lags = {each: _lag(each, rows, tables, status, now_unix_ns) for each, rows in counts.items()}
    state, reason = fleet_state(fleet, lags[offset], _with_unfit(status, tables, consumer), offset)
    if unranked := consumer.policy.unranked([table.spec for table in tables]):
        reason = (
            f"{reason}; the policy cannot rank or quantise {listed(unranked, 3)}, which are not "
            "embedding tables: the service sends all their changed rows"
        )
    if status.trouble:
        reason = f"{reason}; the policy is not in force: {status.trouble}"
    if status.refused:
        reason = f"{reason}; the last cut was refused: {status.refused}"
    if status.unsaved:
        reason = f"{reason}; checkpoints fail: {status.unsaved}"
    kept, objection = consumer.follows, consumer.objection
    follows = "; ".join(filter(None, [kept.description, consumer.waits])) if kept else ""
    objects = objection.description if objection and objection.in_force else ""
    reason = "; ".join(filter(None, [reason, follows and f"follows {follows}", objects]))
    paused = None
    if pause := consumer.pause:  # A pause takes precedence: the service sends nothing.
        paused = PauseStatus(utc(pause.since_unix_ns), pause.by, pause.why, otherwise=state)
        state, reason = "paused", f"{pause.description}; otherwise {state}: {reason}"
    pairs = zip(tables, counts[offset], strict=True)
    lines = [_table_line(table, rows, status, now_unix_ns) for table, rows in pairs]
    connected = sum(replica.stream is not None for replica in fleet)
    follows_ns = now_unix_ns - consumer.follows.since_unix_ns if consumer.follows else 0
    return ConsumerStatus(
        consumer=consumer.name,
        model=consumer.model,
        history=status.history,
        state=state,
        failed=(paused.otherwise if paused else state) == "failed",
        reason=reason,
        head=seals[-1].version if seals else 0,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        fleet=len(fleet),
        connected=connected,
        away=len(fleet) - connected,
        replicas=[
            _replica_status(replica, each, lags[each], status, now_unix_ns, held_back=bool(consumer.pause))
            for replica, each in zip(replicas, offsets, strict=True)
        ],
        tables=lines,
        oldest_row_seconds=max((line.oldest_row_seconds or 0.0 for line in lines), default=0.0)
        if status.release
        else None,
        damages=consumer.damages,
        rewinds=consumer.rewinds,
        damaged_tables=sum(len(replica.damaged) for replica in fleet),
        unbound_tables=sum(len(replica.unbound) for replica in fleet),
        released_rows=consumer.released_rows,
        released_bytes=consumer.released_bytes,
        freshness=freshness_of(consumer.durations),
        release=_release_lag(status.release, status.released, now_unix_ns) if status.release else None,
        policy=consumer.policy.as_dict(),
        policy_words=consumer.policy.description,
        paused=paused,
        follows=follows,
        follows_seconds=max(0, follows_ns) / 1e9,
        objects=objects,
        head_seconds_behind_events=seconds_behind(seals[-1].event_time_unix_ns, now_unix_ns) if seals else None,
    )


def freshness_of(durations: DeliveryDurations) -> Freshness:
    """The freshness of a consumer's replicas."""
    shares = (durations.within(share) for share in (0.5, 0.99))
    p50, p99 = (None if seconds is None else round(seconds, 4) for seconds in shares)
    return Freshness(list(durations.freshness.read()[0]), len(durations.recent), p50, p99)


def _with_unfit(status: FeedStatus, tables: Sequence[TableStatus], consumer: Consumer) -> FeedStatus:
    """Add the reason to a status if the consumer's policy selects no table."""
    if tables or status.unpublished:
        return status
    patterns = ", ".join(consumer.policy.tables)
    return replace(status, unfit=f"no table of model {consumer.model!r} matches {patterns}")


def _tables(status: FeedStatus, replicas: Sequence[Replica]) -> list[TableStatus]:
    """The tables, without their backlogs if these are out of date."""
    tables = status.tables()
    # While no replica is connected, the service makes no releases and does not update backlogs.
    if status.compared or any(replica.stream for replica in replicas):
        return tables
    return [replace(table, backlog=None) for table in tables]


def _lag(offset: int, rows: Sequence[int], tables: Sequence[TableStatus], status: FeedStatus, now: int) -> Lag:
    version, oldest = status.version_of(offset), _oldest_unapplied_version(offset, status)
    lag = measure(version, status.seals, [table.row_bytes for table in tables], rows, now, oldest)
    if lag.versions or lag.rows:
        lag = replace(lag, seconds=_seconds_since(version + 1 if oldest is None else oldest, status, now))
    backlogs = [table.backlog for table in tables if table.backlog]
    if offset != status.newest_release or len(backlogs) < len(tables):
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
    """The lag of a replica that holds the rows of `version` and lacks `lacking` rows of each table.

    `since` is the oldest version that it has not applied; None = the one after `version`. A version whose seal was
    dropped counts as old as the oldest seal.
    """
    newest = seals[-1].version if seals else 0
    oldest = version + 1 if since is None else since
    behind_events = seconds_behind(event_time_of(version, seals), now_unix_ns)
    if newest <= version and not sum(lacking):
        return Lag(0, 0, 0, 0.0, seconds_behind_events=behind_events)
    size = sum(rows * each for rows, each in zip(lacking, row_bytes, strict=True))
    seconds = seconds_since_sealed(oldest, seals, now_unix_ns)
    return Lag(max(0, newest - version), sum(lacking), size, seconds, seconds_behind_events=behind_events)


def _oldest_unapplied_version(offset: int, status: FeedStatus) -> int | None:
    """The oldest version that a replica at `offset` has not applied; None = the one after that of its rows."""
    # The first release that it lacks may be of the same version.
    return None if status.newest_release in (None, offset) else status.version_of(offset)


def _seconds_since(version: int, status: FeedStatus, now: int) -> float:
    """Seconds since a version was sealed, even if the service's clock was changed after it."""
    steady = status.seconds_since(version)
    return seconds_since_sealed(version, status.seals, now) if steady is None else steady


def unsent(backlogs: Sequence[Backlog]) -> tuple[float, float]:
    """The L2 norm of the backlogs of some tables, and its share of the norm of the tables."""
    norm = math.hypot(*(each.amount.norm for each in backlogs))
    whole = math.hypot(*(each.table_norm for each in backlogs))
    return norm, norm / whole if whole else 0.0


def _table_line(table: TableStatus, rows: int, status: FeedStatus, now: int) -> TableLag:
    line = TableLag(table.name, rows, rows * table.row_bytes)
    if table.backlog is None:
        return line
    norm, share = unsent([table.backlog])
    oldest = _seconds_since(table.backlog.oldest_version, status, now) if table.backlog.amount.rows else 0.0
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


def fleet_state(replicas: Sequence[Replica], lag: Lag, status: FeedStatus, offset: int) -> tuple[State, str]:
    """The state of a consumer, and the reason for it."""
    away = [replica.name for replica in replicas if replica.stream is None]
    if not replicas:
        text = status.unpublished or "no replica has subscribed, and none is expected to return"
        return "empty", f"{text}; {status.failure}" if status.failure else text
    if status.failure:
        return "failed", status.failure
    if status.unpublished:
        return "empty", status.unpublished
    if len(away) == len(replicas):
        return "away", _none_connected(len(replicas))
    if damaged := [replica for replica in replicas if replica.damaged]:
        names = ", ".join(f"{replica.name} ({', '.join(replica.damaged)})" for replica in damaged)
        return "damaged", f"rows differ from those sent, and the service sends them again: {names}"
    if status.unfit:
        return "waiting", status.unfit
    state, reason = _holding(replicas, lag, status, offset)
    return state, f"{reason}; away: {listed(away)}" if away else reason


def _holding(replicas: Sequence[Replica], lag: Lag, status: FeedStatus, offset: int) -> tuple[State, str]:
    """Whether the replicas hold the newest version or release, and whether checksums have proved it."""
    if rewound := [f"{each.name} (had {each.rewind.held.number})" for each in replicas if each.rewind]:
        return "behind", f"rows of a discarded history are being replaced in {', '.join(rewound)}"
    everything = lag.versions == 0 and lag.rows == 0
    # Before the first release, no replica can have it.
    if not everything and not (status.newest_release and offset == status.newest_release):
        last = listed(each.name for each in replicas if _offset(each, status) <= offset)
        # The service may make another release of a version that the replicas already have.
        source = counted(lag.versions, "version") if lag.versions else "a release"
        return "behind", f"{counted(lag.rows, 'row')} of {source} not applied yet by {last}"
    newest = status.newest if everything else "the newest release"
    left = "" if everything else f"; {are(lag.rows, 'row')} postponed"
    if partial := [f"{each.name} lacks {', '.join(each.unbound)}" for each in replicas if each.unbound]:
        return "partial", f"some replicas hold only some tables of {newest}: {'; '.join(partial)}{left}"
    if unchecked := [each.name for each in replicas if not each.checked]:
        shown = f"not confirmed by checksums yet: {', '.join(unchecked)}"
        return "delivered", f"{_whole_fleet(replicas, 'has', 'have')} applied {newest}; {shown}{left}"
    return "in sync" if everything else "current", f"{_whole_fleet(replicas, 'holds', 'hold')} {newest}{left}"


def _offset(replica: Replica, status: FeedStatus) -> int:
    return offset_in(status.history, status.seal_of, replica.applied)


def _whole_fleet(replicas: Sequence[Replica], one: str, many: str) -> str:
    return f"all {len(replicas)} replicas {many}" if len(replicas) > 1 else f"the only replica {one}"


def _none_connected(replicas: int) -> str:
    return f"none of the {replicas} replicas is connected" if replicas > 1 else "the only replica is not connected"


def _replica_status(
    replica: Replica, offset: int, lag: Lag, status: FeedStatus, now: int, *, held_back: bool
) -> ReplicaStatus:
    now_ns = steady_ns()
    since_ack_ns = now - replica.acked_unix_ns if replica.acked_ns is None else now_ns - replica.acked_ns
    line = ReplicaStatus(
        replica=replica.name,
        state="connected",
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
        behind=lag.versions > 0 and offset != status.newest_release and not held_back,
        waits_for=_waits_for(replica, status, held_back=held_back),
        guest=replica.guest,
    )
    return replace(line, state=replica_state(line), reason=replica_reason(line))


def _waits_for(replica: Replica, status: FeedStatus, *, held_back: bool) -> str:
    """What keeps the service from sending rows to a replica; empty if nothing does."""
    newest = status.newest_release
    if newest is None and status.seals:
        newest = status.seals[-1].version
    if replica.damaged and held_back and replica.sent_number != newest:
        return "the end of the pause"  # Only the newest release can repair the replica.
    return ""


def _rewound(rewind: Rewind, now_ns: int) -> RewindLag:
    return RewindLag(rewind.held.number, rewind.held.history, round((now_ns - rewind.since_ns) / 1e9, 3))


def _ago(then_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - then_ns) / 1e9, 3)


# Every replica lacks a new version for a moment: only one that lacks it for longer is late.
_LATE_SECONDS = 10.0


# A replica that acknowledges a release later than this is slow.
_SLOW_SECONDS = 2.0


# Damage that is older than this no longer counts as recurring.
_AGAIN_SECONDS = 600.0


def replica_state(line: ReplicaStatus) -> ReplicaState:
    """A replica's worst problem in one word. A guest has none, because nothing relies on it."""
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


def replica_reason(line: ReplicaStatus) -> str:
    """A replica's problems in words; empty without any, and for a guest."""
    if line.guest:
        return ""
    texts = []
    if not line.connected:
        texts.append(
            f"away for {duration(line.since_seconds)}: {line.left or 'not seen since the service started'}"
        )
    if line.damaged:
        damaged = ", ".join(line.damaged)
        texts.append(f"rows differ from those sent to it, and the service sends them again: {damaged}")
    if rewound := line.rewound:
        texts.append(f"connected with {rewound.held} of a discarded history {duration(rewound.seconds)} ago")
    if line.connected and line.behind:
        heard = f"last acknowledgement {duration(line.seconds_since_ack)} ago"
        texts.append(f"lacks {counted(line.lag.versions, 'version')}, {heard}{_slowness(line)}")
    if _damaged_again(line):
        times, ago = counted(line.damages, "time"), duration(line.damaged_seconds_ago or 0.0)
        texts.append(f"rows differed from those sent to it {times}, last {ago} ago: another writer changes them")
    if line.waits_for:
        texts.append(f"waits for {line.waits_for}")
    if line.unbound:
        texts.append(f"leaves out {', '.join(line.unbound)}")
    if line.connected and not line.checked and not line.damaged:
        texts.append("its rows are not confirmed by checksums yet")
    return "; ".join(texts)


def _slowness(line: ReplicaStatus) -> str:
    """A text for a replica that is slow to acknowledge what it was sent; else empty."""
    if line.unacked_seconds < _SLOW_SECONDS:
        return ""
    sent, ago = counted(line.unacked, "release"), duration(line.unacked_seconds)
    return f"; has not acknowledged {sent} sent {ago} ago: it is slow to read or apply them"


def _damaged_again(line: ReplicaStatus) -> bool:
    ago = line.damaged_seconds_ago
    return line.damages > 1 and ago is not None and ago < _AGAIN_SECONDS
