"""What a replica lacks: which rows of which tables, before they are copied."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.core.id_sets import union
from deltasync.core.rows import Ids
from deltasync.core.stamps import StampedTable
from deltasync.feeds.repair import NO_REPAIR, Repair


@dataclass(frozen=True, eq=False)
class LackOfTable:
    """What is lacking of one table.

    Attributes:
        table: the table.
        ids: of the rows that are there, ascending.
        gone: of the rows that are no more, ascending.
    """

    table: StampedTable
    ids: Ids
    gone: Ids

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return len(self.ids) * self.table.spec.row_bytes + self.gone.nbytes


@dataclass(frozen=True, eq=False)
class Lack:
    """Every row stamped after a number, and those of a repair. Good while no row changes.

    Attributes:
        after: the number.
        repair: what else is to be sent.
        tables: what is lacking of each, by slot.
        told: whether all rows that are no more are named. Who holds nothing of a table need not know them.
    """

    after: int
    repair: Repair
    tables: list[LackOfTable]
    told: bool

    @classmethod
    def of(cls, tables: Sequence[StampedTable], after: int, repair: Repair = NO_REPAIR) -> "Lack":
        """What a replica at a number lacks."""
        split = [
            _split(table, 0 if slot in repair.whole else after, repair.rows.get(slot))
            for slot, table in enumerate(tables)
        ]
        return cls(after, repair, [lack for lack, _ in split], all(told for _, told in split))

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return sum(each.nbytes for each in self.tables)

    def serves(self, head: int) -> range:
        """The numbers at which replicas lack nothing else, up to `head`."""
        if self.repair.slots:
            return range(0)
        return range(self.after, head if self.told else min(head, self.after + 1))


def replacing(tables: Sequence[StampedTable], after: int) -> frozenset[int]:
    """Slots of the tables in the place of which a replica at a number may hold others, that are no more: what it
    lacks has all of their rows.
    """
    return frozenset(slot for slot, table in enumerate(tables) if 0 < after <= table.removed_before)


def size_after(tables: Sequence[StampedTable], after: int, repair: Repair = NO_REPAIR) -> int:
    """The bytes of what a replica at a number lacks, without a look at the rows: about, and never too few."""
    return sum(
        table.counts.after(0 if slot in repair.whole else after) * table.spec.row_bytes
        + len(repair.rows.get(slot, ())) * table.spec.row_bytes
        for slot, table in enumerate(tables)
    )


def size_of(tables: Sequence[StampedTable]) -> int:
    """The bytes of all rows there can be, ids and values."""
    return sum(table.spec.rows * table.spec.row_bytes for table in tables)


def _split(table: StampedTable, after: int, others: Ids | None) -> tuple[LackOfTable, bool]:
    """The rows stamped after `after`, and others; whether all of them that are no more are among them."""
    ids = table.changed_since(after)
    if others is not None:
        ids = union(ids, others[: np.searchsorted(others, table.spec.rows)])
    deleted = table.stamps[ids] <= 0
    if not deleted.any():
        return LackOfTable(table, ids, ids[:0]), True
    if table.retag_among(ids[deleted]):  # Nobody is told of a delete that was none.
        deleted = table.stamps[ids] <= 0
    return LackOfTable(table, ids[~deleted], ids[deleted & (after > 0)]), after > 0
