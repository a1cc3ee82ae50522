"""Refuses rows whose norms explode, compared with the largest norm that a row of their table has had.

A mean would be useless, because a few rows with frequent lookups grow far beyond the others. A new row may exceed
the largest by a factor. A table that was never published has no history to compare with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from deltasync.core.digests import squared_norms
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.model.model import Model

# Bytes that one turn on the model's thread reads. Between turns, the thread applies cuts.
_BYTES_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class NormLimit:
    """The factor by which a row's L2 norm may exceed the largest that a row of its table has had.

    The service refuses a cut with a larger row; with `quarantine`, it seals the cut and pauses the consumers.
    """

    growth: float
    quarantine: bool = False


@dataclass(frozen=True)
class RowNorms:
    """The largest norm of some rows; `excess` is why it is too large, empty if it is not."""

    largest: float
    excess: str


class NormGuard:
    """The limit of one model, and the largest norms of its tables. Used in the event loop."""

    def __init__(self, limit: NormLimit | None) -> None:
        self.limit = limit
        self._largest: dict[str, float] = {}
        self._in_quarantine: dict[str, float] = {}  # Not part of the history yet.

    @property
    def quarantines(self) -> bool:
        """Whether to seal a cut that exceeds the limit, and pause the consumers."""
        return self.limit is not None and self.limit.quarantine

    async def learn(self, model: Model, announced: Iterable[TableSpec]) -> None:
        """Read the largest norm of each announced table for which it is unknown."""
        names = {each.name for each in announced if each.kind.trained} - self._largest.keys() if self.limit else ()
        for table in model.tables:
            if table.spec.name in names:
                size, largest = max(1, _BYTES_AT_ONCE // table.spec.row_bytes), 0.0
                for first in range(0, table.slots, size):
                    largest = max(largest, await model.on_thread(_largest_of, table, first, first + size))
                self._largest[table.spec.name] = largest

    def look(self, rows: RowBatch) -> RowNorms | None:
        """Check the norms of rows that arrived, unless the rows have none or there is no limit.

        A column-wise shard counts only its own columns.
        """
        table = rows.shard.table
        if self.limit is None or rows.deleted or not table.kind.trained:
            return None
        squares = squared_norms(rows.values)
        worst = int(squares.argmax())
        norm, largest = float(np.sqrt(squares[worst])), self._largest.get(table.name, 0.0)
        return RowNorms(norm, exceeds(table.name, int(rows.ids[worst]), norm, largest, self.limit.growth))

    def note(self, largest: Mapping[str, float], *, held_back: bool = False) -> None:
        """Record the largest norms of a sealed cut, by table; those of a cut in quarantine wait for `accept`."""
        noted = self._in_quarantine if held_back else self._largest
        for name, norm in largest.items():
            noted[name] = max(norm, noted.get(name, 0.0))

    def accept(self) -> None:
        """Add the rows in quarantine to the history, after operators accepted them."""
        self.note(self._in_quarantine)
        self._in_quarantine = {}

    def forget(self, table: str) -> None:
        """Forget a deleted table."""
        self._largest.pop(table, None)
        self._in_quarantine.pop(table, None)


def exceeds(table: str, row: int, norm: float, largest: float, growth: float) -> str:
    """Why a row's norm is too large, in words; empty if it is not, and without a history."""
    if not largest or norm <= growth * largest:
        return ""
    return (
        f"table {table!r}: row {row} has norm {norm:.4g}, more than {growth:.15g} times the largest norm so far, "
        f"{largest:.4g}: check the training, or raise --max-norm-growth"
    )


def _largest_of(table: StampedTable, first: int, last: int) -> float:
    return float(np.sqrt(squared_norms(table.rows[first:last]).max(initial=0.0)))
