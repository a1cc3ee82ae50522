"""The cursor of a tracker's consumer: the acknowledged stamp, and in some modes the values at that time."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.digests import words_of
from deltasync.core.rows import RowBatch, Values
from deltasync.core.tables import Shard
from deltasync.kernels.rows import scatter
from deltasync.trainer.tracking.compared_rows import BITS
from deltasync.trainer.tracking.options import TrackingMode
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING

# malloc may return freed memory of this size to the system. Reads then touch new pages, and take twice as long.
_LARGE_BYTES = 1 << 20


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
        first_values: by shard, the values of all rows at the cursor, in host memory; NaN for rows that the
            consumer does not have. Empty unless the mode is EMBEDDING.
        memory: memory for the rows that reads return.
        lock: protects all other attributes; acquire it after the gate.
    """

    name: str
    mode: TrackingMode
    cursor: int
    first_values: Mapping[Shard, torch.Tensor] = field(default_factory=dict)
    memory: ReadMemory = field(default_factory=ReadMemory)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def at(cls, cursor: int, name: str, mode: TrackingMode, tables: Sequence[TrackedTable]) -> "ConsumerCursor":
        """A cursor for a consumer that has the current rows: only rows stamped after `cursor` are new to it."""
        shards = (
            [tracked for table in tables for tracked in table.shards] if mode is TrackingMode.EMBEDDING else []
        )
        return cls(name, mode, cursor, {each.shard: _copy(each.weight) for each in shards})

    def emptied(self) -> "ConsumerCursor":
        """A cursor for the same consumer without any row. It reuses the memory of the first values."""
        for rows in self.first_values.values():
            forget(rows, slice(None))
        return self.moved_to(NOTHING)

    def moved_back(self, cursor: int) -> "ConsumerCursor":
        """A cursor for the same consumer at `cursor`, but not later than this one."""
        if self.first_values:
            raise InvalidInput(
                f"consumer {self.name!r} of mode {self.mode.value!r} cannot go back: first values only exist for "
                "its current cursor; resync it without a cursor"
            )
        return self.moved_to(min(cursor, self.cursor))

    def moved_to(self, cursor: int) -> "ConsumerCursor":
        """A cursor for the same consumer at `cursor`. Deltas of this one do not move it."""
        return replace(self, cursor=cursor, memory=ReadMemory(), lock=threading.RLock())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(rows.nbytes for rows in self.first_values.values()) + self.memory.nbytes

    def first_of(self, batch: RowBatch) -> Values:
        """The values that the rows of a batch had at the cursor. Only with first values."""
        ids = torch.from_numpy(batch.ids - batch.shard.row_offset)
        return self.memory.select(self.first_values[batch.shard], ids).numpy()

    def advance(self, cursor: int, rows: Sequence[RowBatch]) -> bool:
        """Move forward to `cursor`, because the consumer has all `rows` up to there; return whether it moved."""
        if cursor <= self.cursor:
            return False
        self.cursor = cursor
        for batch in rows if self.first_values else ():
            words = words_of(self.first_values[batch.shard].numpy())
            scatter(words, 0, batch.ids - batch.shard.row_offset, words_of(np.ascontiguousarray(batch.values)))
        return True

    def forget(self, shards: Sequence[Shard], ids: torch.Tensor) -> None:
        """Drop first values of deleted rows (local ids). If they return, they are new rows."""
        for shard in shards:
            if shard in self.first_values:
                forget(self.first_values[shard], ids.cpu())


def forget(rows: torch.Tensor, ids: torch.Tensor | slice) -> None:
    """Fill rows with a NaN whose bits no computation produces, so that no row of a model equals it."""
    rows.view(BITS[rows.element_size()])[ids] = -1


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
