"""Finds rows that have changed without a mark by comparing all rows with a copy, to debug a model.

For the reading thread, within the gate.
"""

from collections.abc import Iterable, Sequence

import torch

from deltasync.base.errors import Contradiction
from deltasync.trainer.tracking.compared_rows import differing_rows
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import CLOCK_END, RowStamps

_NAMED_ROWS = 10


class Verification:
    """Compares the rows of fused tables with copies. Reads always compare the rows of other tables."""

    def __init__(self, tables: Sequence[TrackedTable], stamps: RowStamps) -> None:
        self._tables, self._stamps = tables, stamps
        self._copies = {
            number: [tracked.weight.clone() for tracked in table.shards]
            for number, table in enumerate(tables)
            if table.fused
        }
        self._excused = set[int]()
        self._cursor = stamps.tick()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies)

    def excuse(self, tables: Iterable[int]) -> None:
        """Leave tables out of the next check, because the user paused marking while they changed."""
        self._excused.update(tables)

    def check(self) -> None:
        """Compare all rows with the copies, and mark rows that have changed without a mark."""
        if self._stamps.clock <= self._cursor:  # The clock has restarted.
            self._cursor = 0
        unseen = {number: self._unseen(number) for number in self._copies}
        self.renew()
        missed = {number: ids for number, ids in unseen.items() if len(ids) and number not in self._excused}
        self._excused.clear()
        for number, ids in missed.items():
            self._stamps.stamp(number, ids)
        if missed:
            raise Contradiction(
                "; ".join(_what_changed(self._tables[number], ids) for number, ids in missed.items())
                + ". No hook of the tracker has seen the change: call the tracker's mark(table, ids) or "
                "mark_all(table) after the code that changes them. The next read offers these rows."
            )

    def renew(self) -> None:
        """Copy the current rows."""
        for number, copies in self._copies.items():
            for tracked, copy in zip(self._tables[number].shards, copies, strict=True):
                copy.copy_(tracked.weight)
        # At the clock's end, leave the restart to the next read.
        self._cursor = CLOCK_END - 1 if self._stamps.clock == CLOCK_END else self._stamps.tick()

    def _unseen(self, number: int) -> torch.Tensor:
        """Local ids of a table's rows that differ from the copies without a later stamp: int64 [n]."""
        shards = zip(self._tables[number].shards, self._copies[number], strict=True)
        differing = torch.stack([differing_rows(tracked.weight, copy) for tracked, copy in shards]).any(dim=0)
        return torch.nonzero(differing & (self._stamps.of(number).abs() <= self._cursor)).squeeze(1)


def _what_changed(table: TrackedTable, ids: torch.Tensor) -> str:
    rows = (ids + table.row_offset).tolist()
    named = ", ".join(map(str, rows[:_NAMED_ROWS]))
    more = f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else ""
    return f"table {table.name!r}: rows {named}{more} have changed, but are not marked"
