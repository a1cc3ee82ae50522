"""The lag of a consumer, put together from what the model, the registry and the view hold."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.fleet import consumer_offset, offset_in
from deltasync.core.policy import Policy
from deltasync.core.seal import Seal, seconds_since_sealed
from deltasync.feeds.model import Model
from deltasync.service.service import Service
from deltasync.status.lag import ConsumerLag, Lag, ReleaseLag, ReplicaLag, TableLag, measure, state, unsent
from deltasync.views.statistics import Backlog, ReleaseStatistics
from deltasync.views.view import View


@dataclass(frozen=True)
class _Table:
    """A table that a consumer follows."""

    name: str
    row_bytes: int
    backlog: Backlog | None  # None = not known.


@dataclass(frozen=True)
class _Facts:
    """What a lag is measured by, taken at one moment: acks, cuts and releases go on while rows are counted.

    Attributes:
        history: the id of the history that offsets belong to.
        newest_release: its number; None without a policy.
        tables: the tables that the consumer follows.
        count: how many rows of each table a replica at an offset lacks.
        version_of: the version of the rows that a replica at an offset holds.
        release: what the newest release took and left; None if there is none.
    """

    history: str
    newest_release: int | None
    tables: list[_Table]
    count: Callable[[int], Awaitable[list[int]]]
    version_of: Callable[[int], int]
    release: ReleaseStatistics | None


async def lag_of(service: Service, consumer: Consumer) -> ConsumerLag:
    """How far a consumer of the service is behind, per replica and per table."""
    return await report(consumer, service.models[consumer.model], service.views.get(consumer))


async def report(consumer: Consumer, model: Model, view: View | None) -> ConsumerLag:
    """How far a consumer is behind, per replica and per table."""
    facts = _facts(consumer, model, view)
    replicas = sorted(consumer.replicas.values(), key=lambda replica: replica.name)
    offset = consumer_offset(replicas, facts.history)
    offsets = [offset_in(facts.history, replica.applied) for replica in replicas]
    seals = tuple(model.seals)
    counts = {each: await facts.count(each) for each in {offset, *offsets}}
    now = time.time_ns()
    lags = {each: _lag(each, rows, facts, seals, now) for each, rows in counts.items()}
    found, reason = state(replicas, lags[offset], newest_release=offset == facts.newest_release)
    if view and view.trouble:
        reason = f"{reason}; the policy is not in force: {view.trouble}"
    tables = [_table_line(each, rows, seals, now) for each, rows in zip(facts.tables, counts[offset], strict=True)]
    return ConsumerLag(
        consumer=consumer.name,
        model=consumer.model,
        history=facts.history,
        state=found,
        reason=reason,
        head=seals[-1].version if seals else 0,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        replicas=[_line(replica, each, lags[each], now) for replica, each in zip(replicas, offsets, strict=True)],
        tables=tables,
        oldest_row_seconds=max((table.oldest_row_seconds for table in tables), default=0.0),
        damages=consumer.damages,
        release=_release_lag(facts.release, now) if facts.release else None,
        policy=consumer.policy.as_dict(),
    )


def _facts(consumer: Consumer, model: Model, view: View | None) -> _Facts:
    if view is None:
        return _facts_of_model(model, consumer.policy)
    if view.state.newest is None:  # Its first release is made once a replica is connected.
        return replace(_facts_of_model(model, consumer.policy), history=view.history, newest_release=0)
    return _facts_of_view(view, connected=any(replica.stream for replica in consumer.replicas.values()))


def _facts_of_model(model: Model, policy: Policy) -> _Facts:
    mapped = tuple(each for each in model.tables if policy.follows(each.spec))
    return _Facts(
        history=model.history,
        newest_release=None,
        tables=[_Table(each.spec.name, policy.row_bytes(each.spec), None) for each in mapped],
        count=lambda offset: model.count_changed_since(offset, mapped),
        version_of=lambda offset: offset,
        release=None,
    )


def _facts_of_view(view: View, *, connected: bool) -> _Facts:
    state = view.state
    # No releases are made, and so no rows compared, while no replica is connected.
    known = connected or state.compared_version == view.model.position.number
    backlog = state.backlog if known else {}
    return _Facts(
        history=view.history,
        newest_release=state.head.number if state.head else 0,
        tables=[
            _Table(each.delivery.spec.name, each.sent.spec.row_bytes, backlog.get(each.delivery.spec.name))
            for each in state.tables
        ],
        count=lambda offset: view.count_lacking(offset, state.tables),
        version_of=view.version_of,
        release=state.newest.statistics if state.newest else None,
    )


def _lag(offset: int, rows: list[int], facts: _Facts, seals: Sequence[Seal], now: int) -> Lag:
    version = facts.version_of(offset)
    lag = measure(
        version,
        seals,
        [table.row_bytes for table in facts.tables],
        rows,
        now,
        _oldest_unapplied_version(offset, facts),
    )
    backlogs = [table.backlog for table in facts.tables if table.backlog]
    if offset != facts.newest_release or len(backlogs) < len(facts.tables):
        return lag
    norm, share = unsent(backlogs)
    return replace(lag, unsent_norm=norm, unsent_share=share)


def _oldest_unapplied_version(offset: int, facts: _Facts) -> int | None:
    """The oldest version that a replica at `offset` has not applied; None: the one after that of its rows."""
    # The first release that it lacks may have been made at the same version.
    return None if facts.newest_release in (None, offset) else facts.version_of(offset)


def _table_line(table: _Table, rows: int, seals: Sequence[Seal], now: int) -> TableLag:
    line = TableLag(table.name, rows, rows * table.row_bytes)
    if table.backlog is None:
        return line
    norm, share = unsent([table.backlog])
    oldest = seconds_since_sealed(table.backlog.oldest_version, seals, now) if table.backlog.amount.rows else 0.0
    return replace(line, oldest_row_seconds=oldest, unsent_norm=norm, unsent_share=share)


def _line(replica: Replica, offset: int, lag: Lag, now: int) -> ReplicaLag:
    return ReplicaLag(
        replica=replica.name,
        connected=replica.stream is not None,
        offset=offset,
        lag=lag,
        seconds_since_ack=round((now - replica.acked_unix_ns) / 1e9, 3),
        checked=replica.checked,
        damaged=list(replica.damaged),
    )


def _release_lag(release: ReleaseStatistics, now: int) -> ReleaseLag:
    return ReleaseLag(
        number=release.number,
        version=release.version,
        seconds_ago=round(max(0, now - release.made_unix_ns) / 1e9, 3),
        rows=release.taken.rows,
        bytes=release.taken.bytes,
        norm=release.taken.norm,
        left_rows=release.backlog.rows,
        left_bytes=release.backlog.bytes,
        left_norm=release.backlog.norm,
        reason=release.reason,
    )
