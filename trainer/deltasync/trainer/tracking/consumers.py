"""Consumers of the tracker: each has a cursor, and may keep the values it was last given."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from deltasync.trainer.tracking.delta import Delta, DeltaRows, Token, largest
from deltasync.trainer.tracking.host import ReadMemory, replace_rows
from deltasync.trainer.tracking.modes import TrackingMode, keeps_first, sources
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING, forget


@dataclass(eq=False)
class Consumer:
    """A named position in what changes.

    Attributes:
        name: of its own.
        mode: what it is given beside ids.
        cursor: what is stamped later is new to it.
        row_offsets: global id of the first row, by FQN.
        view: for modes with first values, the rows as they were at its cursor, by FQN, in host memory; NaN for
            those it has not.
        carried: global ids, ascending, of rows that are due although not stamped later, by FQN.
        memory: for what it is given.
        lock: held while any of these is used.
    """

    name: str
    mode: TrackingMode
    cursor: int
    row_offsets: dict[str, int]
    view: dict[str, torch.Tensor] = field(default_factory=dict)
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: ReadMemory = field(default_factory=ReadMemory)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def starting(cls, name: str, mode: TrackingMode, cursor: int, tables: Sequence[TrackedTable]) -> "Consumer":
        """A consumer to which only what changes from now on is new.

        Raises:
            InvalidInput: a table does not have what the mode reads.
        """
        live = {table.name: sources(table, mode) for table in tables}
        view = {fqn: _copy(tensors) for fqn, tensors in live.items()} if keeps_first(mode) else {}
        return cls(name, mode, cursor, {table.name: table.row_offset for table in tables}, view)

    def emptied(self) -> "Consumer":
        """The same one having nothing: this one's values go to it, and this one is of no use any more."""
        for rows in self.view.values():
            forget(rows, slice(None))
        return self.renewed(NOTHING)

    def renewed(self, cursor: int) -> "Consumer":
        """The same one at another cursor, for which tokens of this one move nothing."""
        return replace(self, cursor=cursor, carried={}, memory=ReadMemory(), lock=threading.RLock())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        kept = [*self.view.values(), *self.carried.values()]
        return sum(int(tensor.nbytes) for tensor in kept) + self.memory.nbytes

    def due(self, table: TrackedTable, changed: torch.Tensor) -> torch.Tensor:
        """Local ids of rows stamped after the cursor, and of those carried over: ascending, each once."""
        carried = self.carried.get(table.name)
        if carried is None:
            return changed
        due: torch.Tensor = torch.unique(torch.cat([changed, carried.to(changed.device) - table.row_offset]))
        return due

    def first(self, table: TrackedTable, ids: torch.Tensor) -> torch.Tensor | None:
        """Values at the cursor of rows with these local ids."""
        return self.memory.select(self.view[table.name], ids) if self.view else None

    def most_changed(self, delta: Delta, k: int) -> Delta:
        """The rows of a delta with the `k` largest norms. The others are carried over.

        So are those that are as they were: the receiver may have had another value of them in between, in a delta
        that was not acknowledged.
        """
        chosen = largest({fqn: rows.norms() for fqn, rows in delta.rows.items()}, k)
        rows = {fqn: delta.rows[fqn].select(mask) for fqn, mask in chosen.items() if mask.any()}
        carried = {fqn: delta.rows[fqn].ids[~mask] for fqn, mask in chosen.items() if not mask.all()}
        return Delta(rows, replace(delta.token, taken=rows, carried=carried))

    def take(self, token: Token) -> bool:
        """Move the cursor to that of a token, unless it has been there already; whether it moved."""
        if token.cursor <= self.cursor:
            return False
        self.cursor, self.carried = token.cursor, dict(token.carried)
        for fqn, rows in token.taken.items() if self.view else ():
            self._see(fqn, rows)
        return True

    def _see(self, fqn: str, rows: DeltaRows) -> None:
        if rows.values is not None:
            replace_rows(self.view[fqn], rows.ids - self.row_offsets[fqn], rows.values)


def _copy(live: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.cpu() for tensor in live], dim=1)
