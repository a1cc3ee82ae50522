"""How many rows are due to a consumer, known to the host before it launches the read.

On a GPU the host would have to wait for all that it has launched to learn how many rows a step has left due. So
they are counted in two iterations: at the end of one step the GPU is asked for a count, which arrives while the
host launches the next; what is stamped meanwhile is counted by the host, at most as many rows as there are ids.
"""

from dataclasses import dataclass
from typing import Self

import torch

from deltasync.trainer.tracking.stamps import RowStamps


@dataclass(frozen=True, eq=False)
class DueCount:
    """A count that a GPU was asked for.

    Attributes:
        cursor: rows stamped after it are counted.
        counts: by table, int64 [1] in host memory, once they have arrived.
        written: `RowStamps.written` when it was asked for.
        arrival: they have arrived; None where they were there at once.
    """

    cursor: int
    counts: list[torch.Tensor]
    written: list[int]
    arrival: torch.cuda.Event | None

    def bounds(self, stamps: RowStamps) -> list[int]:
        """At most how many rows of each table are stamped after the cursor now: no more than the table has.

        Waits for what the GPU was given before the count, not for what it was given since.
        """
        if self.arrival:
            self.arrival.synchronize()
        since = (now - then for now, then in zip(stamps.written, self.written, strict=True))
        rows = (len(of_table) for of_table in stamps.stamps)
        return [min(most, int(count) + more) for most, count, more in zip(rows, self.counts, since, strict=True)]


@dataclass(frozen=True, eq=False)
class BoundedRows:
    """Rows that were gathered before it was known how many they are, and copied to host memory.

    Attributes:
        ids: int64 [bound], local row ids, ascending, then zeros.
        values: of these rows, [bound, d], by shard.
        count: how many of them are meant, int64 [1].
    """

    ids: torch.Tensor
    values: list[torch.Tensor]
    count: torch.Tensor

    @classmethod
    def gathered(cls, stamps: torch.Tensor, cursor: int, bound: int, live: list[torch.Tensor]) -> Self:
        """The rows stamped after a cursor, where they are.

        Args:
            stamps: int32 [rows].
            cursor: see there.
            bound: no more than so many rows are.
            live: [rows, d], what is read of them, by shard.
        """
        due = stamps > cursor
        ids = torch.nonzero_static(due, size=bound, fill_value=0).squeeze(1)
        return cls(ids, [tensor.index_select(0, ids) for tensor in live], due.sum().view(1))

    def in_host_memory(self) -> Self:
        """The same in host memory, once the current stream is done."""
        return type(self)(to_host(self.ids), [to_host(values) for values in self.values], to_host(self.count))

    def trimmed(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Ids and values of the rows that are meant.

        Raises:
            RuntimeError: they are more than were thought possible.
        """
        count = int(self.count)
        if count > len(self.ids):
            raise RuntimeError(f"{count} rows are due, at most {len(self.ids)} were expected: this is a defect")
        return self.ids[:count], [values[:count] for values in self.values]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in host memory, once the current stream is done; itself where it is there already."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
