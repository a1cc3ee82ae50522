"""Rows of views as files have them that no service uses, compared with those of the model; nothing is written."""

from dataclasses import dataclass

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.id_sets import difference
from deltasync.core.mode import Mode
from deltasync.core.rows import Ids
from deltasync.kernels import dirty_rows
from deltasync.service.stored_rows import StoredTable
from deltasync.views.dirty_set import Findings

_BYTES_AT_ONCE = 64 << 20
# Where the stamps are among the arrays of a view's table: of what replicas hold, and of what they are sent.
_HELD, _SENT_IDS = 1, 5


@dataclass(frozen=True, eq=False)
class StoredView:
    """A table of a view, and the one of the model that it is made of.

    Attributes:
        delivery: what replicas are sent of it.
        held: what they hold.
        source: the model's.
        compared_version: the version at which both were compared last.
    """

    delivery: Delivery
    held: StoredTable
    source: StoredTable
    compared_version: int

    def lost(self, unsound: Ids) -> Ids:
        """The rows that replicas do not hold as the model has them, while nothing says that they are to be sent.

        `unsound` are rows [n] of which what is kept is damaged: of these nobody knows.
        """
        rows = min(self.held.spec.rows, self.source.spec.rows)
        size = max(1, _BYTES_AT_ONCE // max(self.held.spec.row_bytes, self.source.spec.row_bytes))
        found = [self._lost(slice(first, min(rows, first + size))) for first in range(0, rows, size)]
        lost = np.concatenate([np.zeros(0, np.int64), *found])
        return difference(difference(difference(lost, unsound), self.held.logged), self.source.logged)

    def _lost(self, some: slice) -> Ids:
        (rows, stamps), held = self.source.read(some)[:2], self.held.read(some)
        sent, marks = held[_SENT_IDS if self.delivery.mode is Mode.IDS else _HELD], held[-1]
        numbers = np.abs(stamps)
        ids = np.flatnonzero((numbers > 0) & (numbers <= self.compared_version) & (marks == 0))
        _, differs = self.delivery.compare(rows, held[0], ids)
        found, counts = Findings.to_come(ids), np.empty((2, len(ids)), np.int64)
        dirty_rows.judge(ids, differs, stamps, held[_HELD], sent, marks, found.dirty, found.flags, *counts)
        lost: Ids = some.start + ids[found.dirty]
        return lost
