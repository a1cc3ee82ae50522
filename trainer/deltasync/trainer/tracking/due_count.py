"""How many rows are due to a consumer, known to the host before it launches the read.

On a GPU the host would have to wait for all that it has launched to learn how many rows a step has left due. So
they are counted in two iterations: at the end of one step the GPU is asked for a count, which arrives while the
host launches the next; what is stamped meanwhile is counted by the host, at most as many rows as there are ids.
"""

from dataclasses import dataclass

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


def due_ids(stamps: torch.Tensor, cursor: int, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows stamped after a cursor, where the stamps are.

    Args:
        stamps: int32 [rows].
        cursor: see there.
        bound: no more than so many rows are.

    Returns:
        Local row ids, int64 [bound], ascending, then zeros; and how many of them are meant, int64 [1].
    """
    due = stamps > cursor
    return torch.nonzero_static(due, size=bound, fill_value=0).squeeze(1), due.sum().view(1)
