"""Cursors of the tracker's consumers: the acknowledged stamps, and in some modes the rows as they were then."""

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

# malloc gives larger blocks back to the system as soon as they are freed.
_LARGE_BYTES = 32 << 20


class Cursors:
    """The cursors of all consumers, which share the clock of the stamps."""

    def __init__(self, tables: Sequence[TrackedTable], stamps: RowStamps, gate: UpdateGate) -> None:
        self._tables, self._stamps, self._gate = tables, stamps, gate
        self._cursors: dict[str, ConsumerCursor] = {}

    def __iter__(self) -> "Iterator[ConsumerCursor]":
        return iter(list(self._cursors.values()))

    def __getitem__(self, consumer: str | None) -> "ConsumerCursor":
        """The cursor of a consumer; None is "default", or the only consumer there is.

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
        """Check that a consumer of that name can be added. Within the gate.

        Raises:
            Contradiction: there is a consumer of that name.
        """
        if name in self._cursors:
            raise Contradiction(f"there is a consumer {name!r} already: remove it first, or take another name")

    def add(self, name: str, mode: TrackingMode) -> None:
        """Add a cursor for a new consumer. Within the gate's `reading`, with all marks settled.

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
        """Move a consumer's cursor back to an earlier one, or before every row. Tokens of earlier reads expire.

        Raises:
            NotFound: there is no such consumer.
            InvalidInput: the consumer has first values, which are not kept for an earlier cursor.
        """
        with self._gate:
            ours = self[consumer]
            with ours.lock:
                # A cursor from before the clock started over is not less than the clock.
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
        """Drop first values of deleted rows of a table (local ids). Within the gate."""
        for cursor in self:
            with cursor.lock:
                cursor.forget(fqn, ids)

    def tick(self) -> int:
        """Return the cursor after all stamps so far, and advance the clock. Within the gate."""
        if self._stamps.clock == CLOCK_END:
            self._stamps.restart_clock()
            self._cursors = {name: cursor.moved_to(0) for name, cursor in self._cursors.items()}
        return self._stamps.tick()

    def restore(self, restored: "dict[str, ConsumerCursor]") -> None:
        """Take over the cursors of a checkpoint; consumers that are not in it begin now. Within the gate."""
        for name, cursor in self._cursors.items():
            if name not in restored:
                restored[name] = ConsumerCursor.at(self._stamps.clock, name, cursor.mode, self._tables)
        self._cursors = restored
        self.tick()


class ReadMemory:
    """Host memory for the rows that reads return.

    Touching new memory costs more than copying rows into it. When nothing refers to the rows of a read any more,
    the next read uses their memory again, and returns the rest to the system.
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
        """Return the memory that the current read has not used to the system."""
        self._free.clear()

    def _block(self, nbytes: int) -> NDArray[np.uint8]:
        blocks = self._free.copy().items()
        fitting = [(block.nbytes, key) for key, block in blocks if nbytes <= block.nbytes <= 4 * nbytes]
        # Pages that nothing touches cost nothing.
        block = self._free.pop(min(fitting)[1]) if fitting else np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        used = block[:nbytes]
        weakref.finalize(used, self._free.__setitem__, id(block), block).atexit = False
        return used


@dataclass(eq=False)
class ConsumerCursor:
    """A consumer's cursor, and the rows that it stands for. Any thread may use it under its `lock`.

    Attributes:
        name: the consumer's name.
        mode: what its reads return beside ids.
        cursor: rows stamped later are new to the consumer.
        row_offsets: by FQN, global id of this rank's first row.
        first_values: by FQN, the rows as they were at the cursor, in host memory, NaN where the consumer has none.
            Empty unless the mode has first values.
        carried: by FQN, global ids, ascending, of rows that are due although not stamped later.
        memory: for the rows that reads return.
        lock: guards all of these; acquired after the gate.
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
        """A cursor for a consumer that has the rows as they are now: rows stamped after `cursor` are new to it.

        Raises:
            InvalidInput: a table does not have what the mode reads.
        """
        live = {table.name: sources(table, mode) for table in tables}
        first_values = {fqn: _copy(tensors) for fqn, tensors in live.items()} if keeps_first(mode) else {}
        return cls(name, mode, cursor, {table.name: table.row_offset for table in tables}, first_values)

    def emptied(self) -> "ConsumerCursor":
        """A cursor for the same consumer without any row. It takes over this one's first values."""
        for rows in self.first_values.values():
            forget(rows, slice(None))
        return self.moved_to(NOTHING)

    def moved_back(self, cursor: int) -> "ConsumerCursor":
        """A cursor for the same consumer at an earlier point, or here. Tokens of this one do not move it.

        Raises:
            InvalidInput: the consumer has first values, which are not kept for an earlier cursor.
        """
        if self.first_values:
            raise InvalidInput(
                f"consumer {self.name!r} of mode {self.mode.value!r}: first values are not kept for long"
            )
        return replace(self.moved_to(min(cursor, self.cursor)), carried=self.carried)

    def moved_to(self, cursor: int) -> "ConsumerCursor":
        """Another cursor for the same consumer. Tokens of this one do not move it."""
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
            stamps: the rank's.
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
        """Add the values at the cursor to rows in host memory. For modes that keep them."""
        fqn = rows.shards[0].table.name
        first = self.memory.select(self.first_values[fqn], rows.ids - self.row_offsets[fqn])
        return replace(rows, first=first)

    def most_changed(self, delta: Delta, k: float, *, per_table: bool) -> Delta:
        """The rows of a delta with the largest norms (see `largest`), and all rows of buffers and maps.

        The other rows are carried over, even with a norm of 0: the receiver may have another value of them, from a
        delta that was not acknowledged.
        """
        ranked = {fqn: rows for fqn, rows in delta.rows.items() if rows.shards[0].table.kind.trained}
        chosen = largest({fqn: rows.norms() for fqn, rows in ranked.items()}, k, per_table=per_table)
        rows = {fqn: rows for fqn, rows in delta.rows.items() if fqn not in ranked}
        rows |= {fqn: delta.rows[fqn].select(mask) for fqn, mask in chosen.items() if mask.any()}
        carried = {fqn: delta.rows[fqn].ids[~mask] for fqn, mask in chosen.items() if not mask.all()}
        return Delta(rows, replace(delta.token, rows=rows, carried=carried), delta.deletes)

    def advance(self, token: Token) -> bool:
        """Move the cursor to a token's, unless it has been there already; return whether it moved."""
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
        """Drop first values of deleted rows of a table (local ids): if they come back, they are new rows."""
        if fqn in self.first_values:
            forget(self.first_values[fqn], ids.cpu())


def _copy(live: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.cpu() for tensor in live], dim=1)


def replace_rows(rows: torch.Tensor, ids: torch.Tensor, column: int, values: torch.Tensor) -> None:
    """Set the rows [n, d] with these ids, in host memory, from a column on."""
    words = words_of(rows.numpy())
    scatter(words, column * words.shape[1] // rows.shape[1], ids.numpy(), words_of(values.numpy()))
