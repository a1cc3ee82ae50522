"""From stamps to rows in host memory."""

from collections.abc import Sequence

import torch

from deltasync.trainer.tracking.consumers import Consumer
from deltasync.trainer.tracking.delta import DeltaRows
from deltasync.trainer.tracking.modes import TrackingMode, gather, sources
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import RowStamps

# Local ids of rows, and their values where they are wanted.
Gathered = dict[TrackedTable, tuple[torch.Tensor, torch.Tensor | None]]


def gather_due(
    consumer: Consumer, mode: TrackingMode, tables: Sequence[TrackedTable], stamps: RowStamps
) -> Gathered:
    """The rows that are due to a consumer, as they are now, in copies where the tables are."""
    found: Gathered = {}
    for number, table in enumerate(tables):
        ids = consumer.due(table, stamps.later(number, consumer.cursor))
        live = sources(table, mode)
        if len(ids):
            found[table] = ids, gather(live, ids, consumer.memory) if live else None
    return found


def to_host(gathered: Gathered) -> Gathered:
    """The same in host memory: on a GPU, once its stream is done."""
    return {
        table: (_to_host(ids), None if values is None else _to_host(values))
        for table, (ids, values) in gathered.items()
    }


def delta_rows(consumer: Consumer, gathered: Gathered) -> dict[str, DeltaRows]:
    """Rows in host memory as the consumer is given them, by FQN."""
    return {
        table.name: DeltaRows(
            ids + table.row_offset if table.row_offset else ids,
            table.columns,
            values,
            consumer.first(table, ids),
            consumer.mode,
        )
        for table, (ids, values) in gathered.items()
    }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
