"""What a read returns, and what acknowledges it: the rows that have changed for a consumer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import Shard
from deltasync.trainer.tracking.cursors import ReadMemory
from deltasync.trainer.tracking.gpu import row_digests, to_host
from deltasync.trainer.tracking.shards import TrackedTable


@dataclass(eq=False)
class Delta:
    """The rows that have changed for a consumer since its cursor. Pass it to `Tracker.acknowledge`.

    On a GPU, `Tracker.begin_delta` returns a delta before its rows have arrived in host memory. Until then, use
    only `arrived` and `result`, from one thread at a time.

    Attributes:
        consumer: the consumer's name.
        cursor: all rows stamped up to here are in the delta.
        rows: by table and shard, the changed rows, then the deleted ones. A deleted row that has changed again is
            a changed one. With ids only, values are [n, 0].
        first: by shard, the values of its changed rows at the consumer's cursor; NaN for rows that the consumer
            does not have, for example after a `resync`. Empty unless the mode is EMBEDDING.
        registration: distinguishes the consumer from an earlier or later one of the same name.
        counts: by table, the number of changed rows, [1], if it is being copied to host memory like the rows.
            Until it arrives, rows that have not changed follow the changed ones.
        arrival: event at the end of all copies; None if they are complete.
    """

    consumer: str
    cursor: int
    rows: list[RowBatch]
    first: Mapping[Shard, Values]
    registration: object
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    arrival: torch.cuda.Event | None = None

    @property
    def arrived(self) -> bool:
        """Whether `result` returns without waiting."""
        return self.arrival is None or bool(self.arrival.query())  # type: ignore[no-untyped-call]

    @property
    def result(self) -> "Delta":
        """This delta, after waiting until its rows are in host memory."""
        if self.arrival:
            self.arrival.synchronize()
            self.arrival = None
        if self.counts:
            counted = (self._counted(batch) for batch in self.rows)
            self.rows, self.counts = [batch for batch in counted if len(batch)], {}
        return self

    @property
    def ids(self) -> dict[str, Ids]:
        """Global ids of the changed rows by table FQN, without the deleted ones."""
        return {batch.table.name: batch.ids for batch in self.rows if not batch.deleted}

    @property
    def deletes(self) -> dict[str, Ids]:
        """Global ids of the deleted rows by table FQN."""
        return {batch.table.name: batch.ids for batch in self.rows if batch.deleted}

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, including first values."""
        return sum(batch.nbytes for batch in self.rows) + sum(each.nbytes for each in self.first.values())

    def _counted(self, batch: RowBatch) -> RowBatch:
        if batch.deleted:
            return batch
        count = int(self.counts[batch.table.name])
        if count > len(batch):
            raise RuntimeError(f"{count} rows are due, at most {len(batch)} were expected: this is a defect")
        return batch[:count]


# A shard, and global ids, values and digests of some of its rows, on the device of the table.
Gathered: TypeAlias = tuple[Shard, torch.Tensor, torch.Tensor, torch.Tensor | None]


def gather(table: TrackedTable, ids: torch.Tensor, memory: ReadMemory, *, values: bool) -> Iterator[Gathered]:
    """Copy the rows with these local ids on the table's device, by shard; without `values`, ids only."""
    # Without an offset, the ids are not copied.
    global_ids = ids + table.row_offset if table.row_offset else ids
    for tracked in table.shards:
        if not values:
            yield tracked.shard, global_ids, tracked.weight.new_empty(len(ids), 0), None
            continue
        rows = memory.select(tracked.weight, ids)
        # A GPU computes digests before the copy to the host, to protect it too. Otherwise the publisher does.
        digests = None if table.device.type == "cpu" else row_digests(rows, tracked.shard)
        yield tracked.shard, global_ids, rows, digests


def batch_on_host(shard: Shard, ids: torch.Tensor, values: torch.Tensor, digests: torch.Tensor | None) -> RowBatch:
    """Make a batch of gathered rows. On a GPU, their copies to host memory are only launched."""
    made = None if digests is None else to_host(digests).numpy().view(np.uint64)
    return RowBatch(shard, to_host(ids).numpy(), to_host(values).numpy(), digests=made)
