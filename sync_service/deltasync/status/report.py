"""The lag of a consumer and the state of each replica, put together from where they stand."""

from collections.abc import Sequence
from dataclasses import replace

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.words import counted, duration, listed
from deltasync.consumers.consumer import Consumer, Replica, Rewind
from deltasync.consumers.registry import consumer_offset, offset_in
from deltasync.core.seal import seconds_behind, seconds_since_sealed
from deltasync.model.feed import ReleaseStatistics, Standing, TableStanding
from deltasync.status.lag import (
    ConsumerLag,
    Lag,
    PauseLag,
    ReleaseLag,
    ReplicaLag,
    ReplicaState,
    RewindLag,
    TableLag,
    measure,
    state,
    unsent,
)

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
    found, reason = state(fleet, lags[offset], _with_unfit(standing, tables, consumer), offset)
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
        paused = PauseLag(pause.since, pause.by, pause.why, found)
        found, reason = "paused", f"{pause.words}; otherwise {found}: {reason}"
    pairs = zip(tables, counts[offset], strict=True)
    lines = [_table_line(table, rows, standing, now_unix_ns) for table, rows in pairs]
    return ConsumerLag(
        consumer=consumer.name,
        model=consumer.model,
        history=standing.history,
        state=found,
        reason=reason,
        head=seals[-1].version if seals else 0,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        replicas=[
            _line(replica, each, lags[each], standing, now_unix_ns, held_back=bool(consumer.pause))
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
    """The same, with what there is to say of a consumer that follows no table."""
    if tables or standing.unpublished:
        return standing
    patterns = ", ".join(consumer.policy.tables)
    return replace(standing, unfit=f"no table of model {consumer.model!r} fits {patterns}")


def _tables(standing: Standing, replicas: Sequence[Replica]) -> list[TableStanding]:
    """The tables; with their backlogs, if these are of now."""
    tables = standing.tables()
    # No releases are made, and so no rows compared, while no replica is connected.
    known = standing.compared or any(replica.stream for replica in replicas)
    return tables if known else [replace(table, backlog=None) for table in tables]


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


def _seconds_since(version: int, standing: Standing, now: int) -> float:
    """Seconds since a version was sealed: also where the service's clock was set since."""
    steady = standing.seconds_since(version)
    return seconds_since_sealed(version, standing.seals, now) if steady is None else steady


def _oldest_unapplied_version(offset: int, standing: Standing) -> int | None:
    """The oldest version that a replica at `offset` has not applied; None: the one after that of its rows."""
    # The first release that it lacks may have been made at the same version.
    return None if standing.newest_release in (None, offset) else standing.version_of(offset)


def _table_line(table: TableStanding, rows: int, standing: Standing, now: int) -> TableLag:
    line = TableLag(table.name, rows, rows * table.row_bytes)
    if table.backlog is None:
        return line
    norm, share = unsent([table.backlog])
    oldest = _seconds_since(table.backlog.oldest_version, standing, now) if table.backlog.amount.rows else 0.0
    return replace(line, oldest_row_seconds=oldest, unsent_norm=norm, unsent_share=share)


def _line(replica: Replica, offset: int, lag: Lag, standing: Standing, now: int, *, held_back: bool) -> ReplicaLag:
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
    """What keeps the service from sending a replica what it should have; empty if nothing does."""
    newest = standing.newest_release
    if newest is None and standing.seals:
        newest = standing.seals[-1].version
    if replica.damaged and held_back and replica.sent_number != newest:
        return "the end of the pause"  # What repairs it is of the newest.
    return ""


def _ago(then_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - then_ns) / 1e9, 3)


def _rewound(rewind: Rewind, now_ns: int) -> RewindLag:
    return RewindLag(rewind.held.number, rewind.held.history, round((now_ns - rewind.since_ns) / 1e9, 3))


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
