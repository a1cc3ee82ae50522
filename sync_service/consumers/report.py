"""The lag of a consumer, put together from what the model and the registry hold."""

import time

from sync_service.consumers.consumer import Consumer, Replica
from sync_service.consumers.lag import ConsumerLag, Lag, ReplicaLag, TableLag, measure, state
from sync_service.consumers.offsets import consumer_offset, offset_in
from sync_service.model import Model


async def report(consumer: Consumer, model: Model) -> ConsumerLag:
    """How far a consumer is behind, per replica and per table."""
    replicas = sorted(consumer.replicas.values(), key=lambda replica: replica.name)
    offset = consumer_offset(replicas, model.history)
    # Taken now: acks, cuts and new tables arrive while the rows are counted.
    offsets = [offset_in(model.history, replica.applied) for replica in replicas]
    mapped, seals = tuple(model.tables), tuple(model.seals)
    tables = [table.table for table in mapped]
    changed = {version: await model.count_changed_since(version, mapped) for version in {offset, *offsets}}
    now = time.time_ns()
    lags = {version: measure(version, seals, tables, counts, now) for version, counts in changed.items()}
    consumer_state, reason = state(replicas, lags[offset])
    return ConsumerLag(
        consumer=consumer.name,
        model=consumer.model,
        history=model.history,
        state=consumer_state,
        reason=reason,
        head=seals[-1].version if seals else 0,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        replicas=[_line(replica, held, lags[held], now) for replica, held in zip(replicas, offsets, strict=True)],
        tables=[
            TableLag(table.name, rows, rows * table.row_bytes)
            for table, rows in zip(tables, changed[offset], strict=True)
        ],
    )


def _line(replica: Replica, offset: int, lag: Lag, now: int) -> ReplicaLag:
    since_ack = round((now - replica.acked_unix_ns) / 1e9, 3)
    return ReplicaLag(replica.name, replica.stream is not None, offset, lag, since_ack)
