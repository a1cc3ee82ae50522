"""Rows whose norms explode, compared with the largest norm that a row of their table has had.

The largest, and not a mean: tables have a few rows that are looked up all the time, and grow far beyond others. A
row may outgrow all of them, but by a factor at most from one cut to the next; a table of which nothing is
published has no history to compare with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from deltasync.core.digests import squared_norms
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.model.model import Model

# Looked at in one turn on the model's thread: cuts are applied in between.
_BYTES_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class NormLimit:
    """By which factor a row's L2 norm may be over the largest that a row of its table has had.

    Where it is more, the cut is refused; or else, for `quarantine`, sealed, and its consumers are paused before.
    """

    growth: float
    quarantine: bool = False


@dataclass(frozen=True)
class RowNorms:
    """The largest norm of some rows, and in words why that is too much; empty if it is not."""

    largest: float = 0.0
    excess: str = ""


class NormGuard:
    """The limit of one model, and the largest norms of its tables. Used in the event loop."""

    def __init__(self, limit: NormLimit | None) -> None:
        self.limit = limit
        self._largest: dict[str, float] = {}
        self._held_back: dict[str, float] = {}  # Of cuts in quarantine: no history yet.

    @property
    def quarantines(self) -> bool:
        """Whether a cut that is over the limit is sealed all the same."""
        return self.limit is not None and self.limit.quarantine

    async def learn(self, model: Model, announced: Iterable[TableSpec]) -> None:
        """Look at the tables of which nothing is known."""
        names = {each.name for each in announced if each.kind.trained} - self._largest.keys() if self.limit else ()
        for table in model.tables:
            if table.spec.name in names:
                size, largest = max(1, _BYTES_AT_ONCE // table.spec.row_bytes), 0.0
                for first in range(0, table.slots, size):
                    largest = max(largest, await model.on_thread(_largest_of, table, first, first + size))
                self._largest[table.spec.name] = largest

    def look(self, rows: RowBatch) -> RowNorms:
        """The norms of rows that have arrived: of column-wise shards, of their part of the columns."""
        table = rows.shard.table
        if self.limit is None or rows.deleted or not table.kind.trained:
            return RowNorms()
        squares = squared_norms(rows.values)
        worst = int(squares.argmax())
        norm, largest = float(np.sqrt(squares[worst])), self._largest.get(table.name, 0.0)
        return RowNorms(norm, exceeds(table.name, int(rows.ids[worst]), norm, largest, self.limit.growth))

    def note(self, largest: Mapping[str, float], *, held_back: bool = False) -> None:
        """Note the largest norms of a cut that is sealed, by table; of one that is held back, for `accept`."""
        noted = self._held_back if held_back else self._largest
        for name, norm in largest.items():
            noted[name] = max(norm, noted.get(name, 0.0))

    def accept(self) -> None:
        """Have operators' word that what was held back is as it should be."""
        self.note(self._held_back)
        self._held_back = {}

    def forget(self, table: str) -> None:
        """Forget a table that is no more."""
        self._largest.pop(table, None)
        self._held_back.pop(table, None)


def exceeds(table: str, row: int, norm: float, largest: float, growth: float) -> str:
    """Why a row's norm is too much, in words; empty if it is not. Without a history nothing is too much."""
    if not largest or norm <= growth * largest:
        return ""
    return (
        f"table {table!r}: row {row} has norm {norm:.4g}, more than {growth:.15g} times the largest that a row of "
        f"it has had, {largest:.4g} (--max-norm-growth)"
    )


def _largest_of(table: StampedTable, first: int, last: int) -> float:
    return float(np.sqrt(squared_norms(table.rows[first:last]).max(initial=0.0)))
