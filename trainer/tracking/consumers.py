"""Consumers of the tracker: each has a cursor, and may keep the values it was last given."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.tracking.delta import DeltaRows, Token
from trainer.tracking.modes import TrackingMode, keeps_first, sources
from trainer.tracking.shards import TrackedTable


@dataclass(eq=False)
class Consumer:
    """A named position in what changes.

    Attributes:
        name: of its own.
        mode: what it is given beside ids.
        cursor: what is stamped later is new to it.
        view: for modes with first values, the rows as they were at its cursor, by FQN, in host memory.
        carried: global ids, ascending, of rows that are due although not stamped later, by FQN.
        lock: held while any of these is used.
    """

    name: str
    mode: TrackingMode
    cursor: int
    view: dict[str, torch.Tensor] = field(default_factory=dict)
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def starting(cls, name: str, mode: TrackingMode, cursor: int, tables: Sequence[TrackedTable]) -> "Consumer":
        """A consumer to which only what changes from now on is new.

        Raises:
            InvalidInput: a table does not have what the mode reads.
        """
        live = {table.name: sources(table, mode) for table in tables}
        view = {fqn: _copy(tensors) for fqn, tensors in live.items()} if keeps_first(mode) else {}
        return cls(name, mode, cursor, view)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(int(kept.nbytes) for by_table in (self.view, self.carried) for kept in by_table.values())

    def due(self, table: TrackedTable, changed: torch.Tensor) -> torch.Tensor:
        """Local ids of rows stamped after the cursor, and of those carried over: ascending, each once."""
        carried = self.carried.get(table.name)
        if carried is None:
            return changed
        due: torch.Tensor = torch.unique(torch.cat([changed, carried.to(changed.device) - table.row_offset]))
        return due

    def first(self, table: TrackedTable, ids: torch.Tensor) -> torch.Tensor | None:
        """Values at the cursor of rows with these local ids."""
        return self.view[table.name].index_select(0, ids) if self.view else None

    def take(self, token: Token, row_offsets: dict[str, int]) -> bool:
        """Move the cursor to that of a token, unless it has been there already; whether it moved."""
        if token.cursor <= self.cursor:
            return False
        self.cursor, self.carried = token.cursor, dict(token.carried)
        if self.view:
            for fqn, rows in token.taken.items():
                self._see(fqn, rows, row_offsets[fqn])
        return True

    def _see(self, fqn: str, rows: DeltaRows, row_offset: int) -> None:
        if rows.values is not None:
            self.view[fqn].index_copy_(0, rows.ids - row_offset, rows.values)


def _copy(live: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.cpu() for tensor in live], dim=1)
