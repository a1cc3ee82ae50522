"""A stamp per row: when it last changed, by a clock that ticks at every read.

Whatever is marked after a read, by a step or from outside, has a later stamp than the cursor that the read
returned. Stamps have 32 bits, half the memory of 64; when the clock has used them up it starts over
(`restart_clock`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from deltasync.trainer.tracking.shards import TrackedTable

# The cursor of a consumer that has nothing: every stamp is later, even that of a row that was never marked.
NOTHING = -1
STAMP_BYTES = 4
CLOCK_END = torch.iinfo(torch.int32).max

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowStamps:
    """The stamps of the tables of a rank.

    Attributes:
        clock: what rows are stamped with now.
        stamps: by table, int32 [rows]; 0 = never; where the row was deleted then, the opposite.
        written: by table, how many stamps were written so far: since any moment, no more rows were stamped.
    """

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        self.clock = 1
        self.stamps = [torch.zeros(table.rows, dtype=torch.int32, device=table.device) for table in tables]
        self.written = [0] * len(tables)
        self._last_delete = dict[int, int]()  # By table, when; a scan is left out where none is later.
        self._tables = tables
        # No lookup tells when these change: they are compared with copies.
        self._compared = {
            number: [tracked.weight.clone() for tracked in table.shards]
            for number, table in enumerate(tables)
            if table.compared
        }

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        copies = sum(copy.nbytes for copies in self._compared.values() for copy in copies)
        return sum(stamps.nbytes for stamps in self.stamps) + copies

    def stamp(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (local ids, any integer type, in any order and number).

        An id outside of the table stamps row 0, which FBGEMM trains in its place.
        """
        stamps = self.stamps[table]
        self.written[table] += len(ids)
        if stamps.is_cuda:
            # They were allocated on another stream, which must not reuse their memory yet.
            ids.record_stream(torch.cuda.current_stream(ids.device))
            stamps.index_fill_(0, _bounded(ids, len(stamps)).long(), self.clock)
        elif len(ids):
            # As unsigned numbers, negative ids are large ones.
            inside = ids.numpy().view(f"u{ids.element_size()}").max() < len(stamps)
            stamps.numpy()[(ids if inside else _bounded(ids, len(stamps))).numpy()] = self.clock

    def stamp_deleted(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (local ids, int64) as deleted: they are zeros by now."""
        self._last_delete[table] = self.clock
        self.stamps[table].index_fill_(0, ids, -self.clock)
        for copy in self._compared.get(table, ()):
            copy.index_fill_(0, ids, 0)

    def stamp_all(self, table: int) -> None:
        """Stamp every row of a table."""
        self.written[table] += len(self.stamps[table])
        self.stamps[table].fill_(self.clock)

    def stamp_held(self, table: int) -> None:
        """Stamp every row of a table that is not deleted."""
        stamps = self.stamps[table]
        self.written[table] += len(stamps)
        stamps.copy_(torch.where(stamps < 0, stamps, self.clock))

    def stamp_refilled(self, table: int) -> None:
        """Stamp the deleted rows of a table that are no longer zeros: they are new rows."""
        if table in self._last_delete:
            deleted = torch.nonzero(self.stamps[table] < 0).squeeze(1)
            for tracked in self._tables[table].shards:
                self.stamp(table, deleted[tracked.weight[deleted].ne(0).any(dim=1)])

    def compare(self) -> None:
        """Stamp the rows that have changed without a lookup."""
        for number, copies in self._compared.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                differing = differing_rows(tracked.weight, copy)
                if copy.is_cuda:
                    self._stamp_where(number, differing)
                    copy.copy_(tracked.weight)
                    continue
                ids = torch.nonzero(differing).squeeze(1)
                self.stamp(number, ids)
                copy.index_copy_(0, ids, tracked.weight.index_select(0, ids))

    def _stamp_where(self, table: int, mask: torch.Tensor) -> None:
        """Stamp the rows of a mask [rows]: the host need not know how many they are."""
        self.written[table] += len(mask)
        self.stamps[table].masked_fill_(mask, self.clock)

    def restore(self, clock: int, stamps: Sequence[torch.Tensor]) -> None:
        """Go on from other stamps; rows are compared with what they are now from here on."""
        self.clock = clock
        for number, (ours, theirs) in enumerate(zip(self.stamps, stamps, strict=True)):
            ours.copy_(theirs)
            self.written[number] += len(ours)
        least = {number: int(ours.min()) for number, ours in enumerate(self.stamps) if len(ours)}
        self._last_delete = {number: -stamp for number, stamp in least.items() if stamp < 0}
        for number, copies in self._compared.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                copy.copy_(tracked.weight)

    def later(self, table: int, cursor: int) -> torch.Tensor:
        """Local ids, ascending, of the rows stamped after `cursor` and not deleted: int64 [n]."""
        stamps = self.stamps[table]
        if stamps.is_cuda:
            return torch.nonzero(stamps > cursor).squeeze(1)
        return torch.from_numpy(np.flatnonzero(stamps.numpy() > cursor))

    def deleted_later(self, table: int, cursor: int) -> torch.Tensor:
        """Local ids, ascending, of the rows deleted after `cursor`: int64 [n].

        A consumer that has nothing gets all of them: it may have taken rows that it did not acknowledge.
        """
        if self._last_delete.get(table, 0) <= max(cursor, 0):
            return torch.empty(0, dtype=torch.int64)
        return torch.nonzero(self.stamps[table] < -max(cursor, 0)).squeeze(1)

    def not_deleted(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Those of some local ids whose rows are not deleted."""
        return ids[self.stamps[table][ids] >= 0]

    def tick(self) -> int:
        """The cursor after all stamps so far; later ones are greater."""
        cursor, self.clock = self.clock, self.clock + 1
        return cursor

    def restart_clock(self) -> None:
        """Start over, with every row marked: for a cursor of 0, all of them have changed or were deleted."""
        self.clock = 1
        self._last_delete = dict.fromkeys(self._last_delete, self.clock)
        for number, stamps in enumerate(self.stamps):
            stamps.copy_(torch.where(stamps < 0, -self.clock, self.clock))
            self.written[number] += len(stamps)


def _bounded(ids: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.where((ids >= 0) & (ids < rows), ids, 0)


def differing_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which rows of two [n, d] tensors of a type differ in a bit: bool [n]. A NaN equals itself, 0.0 not -0.0."""
    bits = _BITS[rows.element_size()]
    return (rows.view(bits) != others.view(bits)).any(dim=1)


def forget(rows: torch.Tensor, ids: torch.Tensor | slice) -> None:
    """Make rows NaN, of bits that no computation results in: no row of a model equals them."""
    rows.view(_BITS[rows.element_size()])[ids] = -1
