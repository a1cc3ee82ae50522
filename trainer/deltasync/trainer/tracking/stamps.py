"""A stamp per row: when it last changed, by a clock that ticks at every read.

What is marked after a read, be it by a step or from outside between two steps, is later than the cursor the read
returned. Stamps are 32-bit: they cost a GPU half the memory, and the clock can start over (`restart_clock`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from deltasync.trainer.tracking.shards import TrackedTable

# "Has nothing": every row is later, also one that was never marked.
NOTHING = -1
STAMP_BYTES = 4
CLOCK_END = torch.iinfo(torch.int32).max

_BITS = {2: torch.int16, 4: torch.int32}


class RowStamps:
    """The stamps of the tables of a rank.

    Attributes:
        clock: what rows are stamped with now.
        stamps: by table, int32 [rows]; 0 = never.
    """

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        self.clock = 1
        self.stamps = [torch.zeros(table.rows, dtype=torch.int32, device=table.device) for table in tables]
        self._tables = tables
        # What cannot be seen to change in a lookup is compared with what it was.
        self._compared = {
            number: [tracked.weight.clone() for tracked in table.shards]
            for number, table in enumerate(tables)
            if not table.fused
        }

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        copies = sum(copy.nbytes for copies in self._compared.values() for copy in copies)
        return sum(stamps.nbytes for stamps in self.stamps) + copies

    def stamp(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (local ids, any integer type, in any order and number).

        An id that is none of the table's stands for row 0, which FBGEMM takes instead and trains.
        """
        stamps = self.stamps[table]
        if stamps.is_cuda:
            # Whoever let go of them did so on another stream.
            ids.record_stream(torch.cuda.current_stream(ids.device))
            stamps.index_fill_(0, _bounded(ids, len(stamps)).long(), self.clock)
        elif len(ids):
            # Taken for unsigned, a negative id is a large one.
            inside = ids.numpy().view(f"u{ids.element_size()}").max() < len(stamps)
            stamps.numpy()[(ids if inside else _bounded(ids, len(stamps))).numpy()] = self.clock

    def stamp_all(self, table: int) -> None:
        """Stamp every row of a table."""
        self.stamps[table].fill_(self.clock)

    def compare(self) -> None:
        """Stamp the rows that have changed without a lookup."""
        for number, copies in self._compared.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                ids = torch.nonzero(differing_rows(tracked.weight, copy)).squeeze(1)
                self.stamp(number, ids)
                copy.index_copy_(0, ids, tracked.weight.index_select(0, ids))

    def restore(self, clock: int, stamps: Sequence[torch.Tensor]) -> None:
        """Go on from other stamps, and take the rows as they are now for what they were."""
        self.clock = clock
        for ours, theirs in zip(self.stamps, stamps, strict=True):
            ours.copy_(theirs)
        for number, copies in self._compared.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                copy.copy_(tracked.weight)

    def later(self, table: int, cursor: int) -> torch.Tensor:
        """Local ids, ascending, of the rows stamped after `cursor`: int64 [n]."""
        stamps = self.stamps[table]
        if stamps.is_cuda:
            return torch.nonzero(stamps > cursor).squeeze(1)
        return torch.from_numpy(np.flatnonzero(stamps.numpy() > cursor))

    def tick(self) -> int:
        """The cursor that lies after all that is stamped by now."""
        taken, self.clock = self.clock, self.clock + 1
        return taken

    def restart_clock(self) -> None:
        """Begin anew, with every row marked: a cursor of 0 has all of them before it."""
        self.clock = 1
        for stamps in self.stamps:
            stamps.fill_(self.clock)


def _bounded(ids: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.where((ids >= 0) & (ids < rows), ids, 0)


def differing_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which rows of two [n, d] tensors of a type differ in a bit: bool [n]. A NaN equals itself, 0.0 not -0.0."""
    bits = _BITS[rows.element_size()]
    return (rows.view(bits) != others.view(bits)).any(dim=1)


def forget(rows: torch.Tensor, ids: torch.Tensor | slice) -> None:
    """Make rows NaN, of bits that no computation leaves: nothing else is equal to them."""
    rows.view(_BITS[rows.element_size()])[ids] = -1
