"""Cursors of the tracker's consumers: the acknowledged stamp, and in some modes the values at that time."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.core.digests import words_of
from deltasync.kernels.rows import scatter
from deltasync.trainer.tracking.delta import Delta, DeltaRows, Token, largest
from deltasync.trainer.tracking.options import DEFAULT_CONSUMER, TrackingMode, keeps_first, sources
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import CLOCK_END, NOTHING, RowStamps, forget
from deltasync.trainer.tracking.update_gate import UpdateGate

# malloc returns blocks above this size to the system as soon as they are freed.
_LARGE_BYTES = 32 << 20


class Cursors:
    """The cursors of all consumers, which share the clock of the stamps."""

    def __init__(self, tables: Sequence[TrackedTable], stamps: RowStamps, gate: UpdateGate) -> None:
        self._tables, self._stamps, self._gate = tables, stamps, gate
        self._cursors: dict[str, ConsumerCursor] = {}

    def __iter__(self) -> "Iterator[ConsumerCursor]":
        return iter(list(self._cursors.values()))

    def __getitem__(self, consumer: str | None) -> "ConsumerCursor":
        """The cursor of a consumer; None means "default", or the only consumer.

        Raises:
            NotFound: there is no such consumer.
        """
        name = consumer or (DEFAULT_CONSUMER if DEFAULT_CONSUMER in self._cursors else None)
        if name is None and len(self._cursors) == 1:
            return next(iter(self._cursors.values()))
        if name not in self._cursors:
            raise NotFound(f"no consumer {name or DEFAULT_CONSUMER!r}; there are: {', '.join(self._cursors)}")
        return self._cursors[name]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(cursor.nbytes for cursor in self)

    def check_new(self, name: str) -> None:
        """Check that a consumer of that name can be added. Call within the gate.

        Raises:
            Contradiction: there is a consumer of that name.
        """
        if name in self._cursors:
            raise Contradiction(f"there is a consumer {name!r} already: remove it first, or use another name")

    def add(self, name: str, mode: TrackingMode) -> None:
        """Add a cursor for a new consumer. Call within the gate's `reading`, with all marks settled.

        Raises:
            InvalidInput: a table does not have what the mode reads.
        """
        self._cursors[name] = ConsumerCursor.at(self.tick(), name, mode, self._tables)

    def remove(self, name: str) -> None:
        """Remove the cursor of a consumer.

        Raises:
            NotFound: there is no such consumer.
        """
        with self._gate:
            del self._cursors[self[name].name]

    def resync(self, consumer: str | None, cursor: int = NOTHING) -> None:
        """Move a consumer's cursor back to an earlier one, or before all rows. Tokens of earlier reads expire.

        Raises:
            NotFound: there is no such consumer.
            InvalidInput: the consumer has first values, which only exist for its current cursor.
        """
        with self._gate:
            ours = self[consumer]
            with ours.lock:
                # A cursor that is not below the clock is from before the clock was restarted.
                usable = NOTHING < cursor < self._stamps.clock
                self._cursors[ours.name] = ours.moved_back(cursor) if usable else ours.emptied()

    def acknowledge(self, token: Token) -> bool:
        """Move a consumer's cursor to a token's; return whether it moved."""
        cursor = self._cursors.get(token.consumer)
        if cursor is None:
            return False
        with cursor.lock:
            return token.registration is cursor and cursor.advance(token)

    def forget(self, fqn: str, ids: torch.Tensor) -> None:
        """Drop first values of deleted rows of a table (local ids). Call within the gate."""
        for cursor in self:
            with cursor.lock:
                cursor.forget(fqn, ids)

    def tick(self) -> int:
        """Return the cursor after all stamps so far, and advance the clock. Call within the gate."""
        if self._stamps.clock == CLOCK_END:
            self._stamps.restart_clock()
            self._cursors = {name: cursor.moved_to(0) for name, cursor in self._cursors.items()}
        return self._stamps.tick()

    def restore(self, restored: "dict[str, ConsumerCursor]") -> None:
        """Replace all cursors by those of a checkpoint. Consumers that are not in it start now, with all rows.

        Call within the gate.
        """
        for name, cursor in self._cursors.items():
            if name not in restored:
                restored[name] = ConsumerCursor.at(self._stamps.clock, name, cursor.mode, self._tables)
        self._cursors = restored
        self.tick()


class ReadMemory:
    """Host memory for the rows that reads return.

    Touching new memory costs more than copying rows into it. When nothing refers to the rows of a read any more,
    the next read reuses their memory, and returns the rest to the system.
    """

    def __init__(self) -> None:
        self._free: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next read."""
        return sum(block.nbytes for block in self._free.copy().values())

    def select(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copies of the rows [n, d] with these ids, on the same device."""
        nbytes = len(ids) * rows.shape[1] * rows.element_size()
        if rows.is_cuda or nbytes < _LARGE_BYTES:
            return rows.index_select(0, ids)
        copies = torch.from_numpy(self._block(nbytes)).view(rows.dtype).view(len(ids), rows.shape[1])
        return torch.index_select(rows, 0, ids, out=copies)

    def trim(self) -> None:
        """Return memory to the system that the current read has not used."""
        self._free.clear()

    def _block(self, nbytes: int) -> NDArray[np.uint8]:
        blocks = self._free.copy().items()
        fitting = [(block.nbytes, key) for key, block in blocks if nbytes <= block.nbytes <= 4 * nbytes]
        # Rounding up is free, because untouched pages cost no memory.
        block = self._free.pop(min(fitting)[1]) if fitting else np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        used = block[:nbytes]
        weakref.finalize(used, self._free.__setitem__, id(block), block).atexit = False
        return used


@dataclass(eq=False)
class ConsumerCursor:
    """The cursor of a consumer, with its first values. Any thread may use it while it has the `lock`.

    Attributes:
        name: the consumer's name.
        mode: what its reads return in addition to ids.
        cursor: rows stamped later are new to the consumer.
        row_offsets: by FQN, global id of this rank's first row.
        first_values: by FQN, the values of all rows at the cursor, in host memory, NaN for rows that the consumer
            does not have. Empty unless the mode has first values.
        carried: by FQN, global ids, ascending, of rows that are due although their stamps are not later.
        memory: memory for the rows that reads return.
        lock: protects all other attributes; acquire it after the gate.
    """

    name: str
    mode: TrackingMode
    cursor: int
    row_offsets: dict[str, int]
    first_values: dict[str, torch.Tensor] = field(default_factory=dict)
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: ReadMemory = field(default_factory=ReadMemory)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def at(cls, cursor: int, name: str, mode: TrackingMode, tables: Sequence[TrackedTable]) -> "ConsumerCursor":
        """A cursor for a consumer that has the current rows: only rows stamped after `cursor` are new to it.

        Raises:
            InvalidInput: a table does not have what the mode reads.
        """
        live = {table.name: sources(table, mode) for table in tables}
        first_values = {fqn: _copy(tensors) for fqn, tensors in live.items()} if keeps_first(mode) else {}
        return cls(name, mode, cursor, {table.name: table.row_offset for table in tables}, first_values)

    def emptied(self) -> "ConsumerCursor":
        """A cursor for the same consumer without any row. It reuses the memory of the first values."""
        for rows in self.first_values.values():
            forget(rows, slice(None))
        return self.moved_to(NOTHING)

    def moved_back(self, cursor: int) -> "ConsumerCursor":
        """A cursor for the same consumer at `cursor`, but not later than this one. Earlier tokens do not move it.

        Raises:
            InvalidInput: the consumer has first values, which only exist for its current cursor.
        """
        if self.first_values:
            raise InvalidInput(
                f"consumer {self.name!r} of mode {self.mode.value!r} cannot go back: first values only exist for "
                "its current cursor; resync it without a cursor"
            )
        return replace(self.moved_to(min(cursor, self.cursor)), carried=self.carried)

    def moved_to(self, cursor: int) -> "ConsumerCursor":
        """A cursor for the same consumer at `cursor`. Tokens of this one do not move it."""
        return replace(self, cursor=cursor, carried={}, memory=ReadMemory(), lock=threading.RLock())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        tensors = [*self.first_values.values(), *self.carried.values()]
        return sum(int(tensor.nbytes) for tensor in tensors) + self.memory.nbytes

    def due(self, table: TrackedTable, stamps: RowStamps, number: int) -> torch.Tensor:
        """Local ids, ascending, of the rows stamped after the cursor or carried over.

        Args:
            table: the table.
            stamps: the stamps of this rank.
            number: the table's number in `stamps`.
        """
        changed, carried = stamps.later(number, self.cursor), self.carried.get(table.name)
        if carried is None:
            return changed
        left = stamps.not_deleted(number, carried.to(changed.device) - table.row_offset)
        due: torch.Tensor = torch.unique(torch.cat([changed, left]))
        return due

    def first_rows(self, table: TrackedTable, ids: torch.Tensor) -> torch.Tensor | None:
        """The values that rows (local ids) had at the cursor; None if the mode has no first values."""
        return self.memory.select(self.first_values[table.name], ids) if self.first_values else None

    def with_first(self, rows: DeltaRows) -> DeltaRows:
        """Add the values at the cursor to rows in host memory. Only for modes with first values."""
        fqn = rows.shards[0].table.name
        first = self.memory.select(self.first_values[fqn], rows.ids - self.row_offsets[fqn])
        return replace(rows, first=first)

    def most_changed(self, delta: Delta, k: float, *, per_table: bool) -> Delta:
        """The rows of a delta with the largest norms (see `largest`), and all rows of buffers and maps.

        Carries the other rows over, even with a norm of 0, because the receiver may have another value from a
        delta that it did not acknowledge.
        """
        ranked = {fqn: rows for fqn, rows in delta.rows.items() if rows.shards[0].table.kind.trained}
        chosen = largest({fqn: rows.norms() for fqn, rows in ranked.items()}, k, per_table=per_table)
        rows = {fqn: rows for fqn, rows in delta.rows.items() if fqn not in ranked}
        rows |= {fqn: delta.rows[fqn].select(mask) for fqn, mask in chosen.items() if mask.any()}
        carried = {fqn: delta.rows[fqn].ids[~mask] for fqn, mask in chosen.items() if not mask.all()}
        return Delta(rows, replace(delta.token, rows=rows, carried=carried), delta.deletes)

    def advance(self, token: Token) -> bool:
        """Move the cursor forward to that of a token; return whether it moved."""
        if token.cursor <= self.cursor:
            return False
        self.cursor = token.cursor
        self.carried = dict(token.carried)
        if not self.first_values:
            return True
        for fqn, rows in token.rows.items():
            ids, column = rows.ids - self.row_offsets[fqn], 0
            for values in rows.shard_values:
                replace_rows(self.first_values[fqn], ids, column, values)
                column += values.shape[1]
        for fqn, deleted in token.deletes.items():
            self.first_values[fqn].index_fill_(0, deleted.ids - self.row_offsets[fqn], 0)
        return True

    def forget(self, fqn: str, ids: torch.Tensor) -> None:
        """Drop first values of deleted rows of a table (local ids). If they return, they are new rows."""
        if fqn in self.first_values:
            forget(self.first_values[fqn], ids.cpu())


def _copy(live: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.cpu() for tensor in live], dim=1)


def replace_rows(rows: torch.Tensor, ids: torch.Tensor, column: int, values: torch.Tensor) -> None:
    """Overwrite rows [n, d] with these ids, in host memory, starting at a column."""
    words = words_of(rows.numpy())
    scatter(words, column * words.shape[1] // rows.shape[1], ids.numpy(), words_of(values.numpy()))
