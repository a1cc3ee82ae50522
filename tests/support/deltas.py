"""The rows of a delta by table, with the columns of its shards side by side."""

import torch

from deltasync.core.rows import RowBatch
from deltasync.trainer.tracking import Delta


def columns_of(delta: Delta, table: str) -> list[tuple[int, int]]:
    """Offset and number of the columns of each shard."""
    return [(batch.shard.col_offset, batch.shard.cols) for batch in delta.rows if _is_changed(batch, table)]


def values_of(delta: Delta, table: str) -> torch.Tensor:
    """The current values of the changed rows."""
    return torch.cat([torch.from_numpy(batch.values) for batch in delta.rows if _is_changed(batch, table)], dim=1)


def first_of(delta: Delta, table: str) -> torch.Tensor:
    """The first values of the changed rows."""
    shards = [batch.shard for batch in delta.rows if _is_changed(batch, table)]
    return torch.cat([torch.from_numpy(delta.first[shard]) for shard in shards], dim=1)


def _is_changed(batch: RowBatch, table: str) -> bool:
    return batch.table.name == table and not batch.deleted
