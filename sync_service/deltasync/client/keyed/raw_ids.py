"""Which raw ids a release takes from rows, and which it gives them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import Contradiction
from deltasync.core.id_sets import distinct
from deltasync.core.raw_ids import raw_ids_of
from deltasync.core.rows import Ids, Mask, RowBatch
from deltasync.core.tables import TableKind, TableSpec

# The entries of a map, see `core.raw_ids`.
Entries = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RawIdChange:
    """The raw ids of the rows that a release touches: those of the table, and those of its map.

    Attributes:
        rows: [n], ascending.
        before: their entries in the map that is held, [n].
        after: their entries with the release, [n].
    """

    rows: Ids
    before: Entries
    after: Entries

    @classmethod
    def of(cls, touched: Ids, entries: Sequence[RowBatch], held: Callable[[Ids], Entries]) -> "RawIdChange":
        """What a release changes.

        Args:
            touched: other rows than those of `entries`, in any order.
            entries: what it brings of the map.
            held: the entries of some rows in the map that is held.

        Raises:
            Contradiction: two rows would have one raw id.
        """
        rows = distinct(np.concatenate([touched, *(each.ids for each in entries)]))
        before = held(rows)
        after = before.copy()
        for each in entries:
            after[np.searchsorted(rows, each.ids)] = each.values[:, 0]
        change = cls(rows, before, after)
        change._check(entries)
        return change

    @property
    def erased(self) -> Ids:
        """The raw ids that these rows had, and that none of them has any more: [m]."""
        return raw_ids_of(np.setdiff1d(self.before[self.before != 0], self.after))

    def at(self, rows: Ids) -> Ids:
        """Where some of the rows are among them."""
        return np.searchsorted(self.rows, rows)

    def _check(self, entries: Sequence[RowBatch]) -> None:
        order = np.argsort(self.after, kind="stable")
        ordered = self.after[order]
        twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0))
        if len(twice):
            rows = self.rows[order[twice[0] : twice[0] + 2]].tolist()
            raise two_rows(entries[0].table.name, int(raw_ids_of(ordered[twice[0]])), rows)


def two_rows(table: str, raw_id: int, rows: Iterable[int]) -> Contradiction:
    """The error that a map names one raw id for two rows."""
    first, second = sorted(rows)
    return Contradiction(f"table {table!r}: raw id {raw_id} has two rows, {first} and {second}")


def maps_of(tables: Iterable[TableSpec]) -> dict[str, TableSpec]:
    """The maps of raw ids among some tables, by the names of those whose rows they name."""
    return {table.of: table for table in tables if table.kind is TableKind.ID_MAP}


def ids_of(rows: Iterable[RowBatch]) -> Ids:
    """The row ids of some batches, one after the other."""
    return np.concatenate([np.empty(0, np.int64), *(each.ids for each in rows)])


def named_raw_ids(entries: Entries) -> tuple[Mask, Ids]:
    """Which entries of a map name a raw id, and those raw ids."""
    named = entries != 0
    return named, raw_ids_of(entries[named])
