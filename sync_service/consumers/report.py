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
    offsets = {offset, *(offset_in(model.history, replica.applied) for replica in replicas)}
    changed = {version: await model.count_changed_since(version) for version in offsets}
    now, seals = time.time_ns(), tuple(model.seals)
    tables = [mapped.table for mapped in model.tables]
    lags = {version: measure(version, seals, tables, counts, now) for version, counts in changed.items()}
    consumer_state, reason = state(replicas, lags[offset])
    return ConsumerLag(
        consumer=consumer.name,
        model=consumer.model,
        history=model.history,
        state=consumer_state,
        reason=reason,
        head=model.sealed_version,
        head_step=seals[-1].step if seals else 0,
        offset=offset,
        lag=lags[offset],
        replicas=[_line(replica, model.history, lags, now) for replica in replicas],
        tables=[
            TableLag(table.name, rows, rows * table.row_bytes)
            for table, rows in zip(tables, changed[offset], strict=True)
        ],
    )


def _line(replica: Replica, history: str, lags: dict[int, Lag], now: int) -> ReplicaLag:
    offset = offset_in(history, replica.applied)
    since_ack = round((now - replica.acked_unix_ns) / 1e9, 3)
    return ReplicaLag(replica.name, replica.stream is not None, offset, lags[offset], since_ack)
