"""What a read returns, from which cursor it reads, and how rows are gathered on the way to host memory."""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.digests import first_word, weights, words_of
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import Shard
from deltasync.kernels.rows import scatter
from deltasync.trainer.tracking.compared_rows import BITS
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING
from deltasync.trainer.tracking.tracked_model import TrackingMode


@dataclass(eq=False)
class Delta:
    """The rows that have changed for a consumer since its cursor. Pass it to `Tracker.acknowledge`.

    On a GPU, `Tracker.begin_delta` returns a delta before its rows have arrived in host memory. Until then, use
    only `arrived` and `result`, from one thread at a time.

    Attributes:
        consumer: the consumer's name.
        cursor: all rows stamped up to here are in the delta.
        rows: by table and shard, the changed rows, then the deleted ones. A deleted row that has changed again is
            a changed one. With ids only, values are [n, 0].
        first: by shard, the values of its changed rows at the consumer's cursor; NaN for rows that the consumer
            does not have, for example after a `resync`. Empty unless the mode is EMBEDDING.
        registration: distinguishes the consumer from an earlier or later one of the same name.
        counts: by table, the number of changed rows, [1], if it is being copied to host memory like the rows.
            Until it arrives, rows that have not changed follow the changed ones.
        arrival: event at the end of all copies; None if they are complete.
    """

    consumer: str
    cursor: int
    rows: list[RowBatch]
    first: Mapping[Shard, Values]
    registration: object
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    arrival: torch.cuda.Event | None = None

    @property
    def arrived(self) -> bool:
        """Whether `result` returns without waiting."""
        return self.arrival is None or bool(self.arrival.query())  # type: ignore[no-untyped-call]

    @property
    def result(self) -> "Delta":
        """This delta, after waiting until its rows are in host memory."""
        if self.arrival:
            self.arrival.synchronize()
            self.arrival = None
        if self.counts:
            counted = (batch if batch.deleted else self._counted(batch) for batch in self.rows)
            self.rows, self.counts = [batch for batch in counted if len(batch)], {}
        return self

    @property
    def ids(self) -> dict[str, Ids]:
        """Global ids of the changed rows by table FQN, without the deleted ones."""
        return {batch.table.name: batch.ids for batch in self.rows if not batch.deleted}

    @property
    def deletes(self) -> dict[str, Ids]:
        """Global ids of the deleted rows by table FQN."""
        return {batch.table.name: batch.ids for batch in self.rows if batch.deleted}

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, including first values."""
        return sum(batch.nbytes for batch in self.rows) + sum(each.nbytes for each in self.first.values())

    def _counted(self, batch: RowBatch) -> RowBatch:
        count = int(self.counts[batch.table.name])
        if count > len(batch):
            raise RuntimeError(f"{count} rows are due, at most {len(batch)} were expected: this is a defect")
        return batch[:count]


# -- cursors

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
        blocks = self._free.copy().items()
        fitting = [(block.nbytes, key) for key, block in blocks if nbytes <= block.nbytes <= 4 * nbytes]
        # Rounding up is free, because untouched pages cost no memory.
        block = self._free.pop(min(fitting)[1]) if fitting else np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        used = block[:nbytes]
        weakref.finalize(used, self._free.__setitem__, id(block), block).atexit = False
        copies = torch.from_numpy(used).view(rows.dtype).view(len(ids), rows.shape[1])
        return torch.index_select(rows, 0, ids, out=copies)

    def trim(self) -> None:
        """Return memory to the system that the current read has not used."""
        self._free.clear()


@dataclass(eq=False)
class ConsumerCursor:
    """The cursor of a consumer, with its first values. Any thread may use it while it has the `lock`."""

    name: str  # The consumer's name.
    mode: TrackingMode  # What its reads return in addition to ids.
    cursor: int  # Rows stamped later are new to the consumer.
    # By shard, the values of all rows at the cursor, in host memory; NaN for rows that the consumer does not
    # have. Empty unless the mode is EMBEDDING.
    first_values: Mapping[Shard, torch.Tensor] = field(default_factory=dict)
    memory: ReadMemory = field(default_factory=ReadMemory)  # Memory for the rows that reads return.
    # Protects all other attributes; acquire it after the gate.
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def at(cls, cursor: int, name: str, mode: TrackingMode, tables: Sequence[TrackedTable]) -> "ConsumerCursor":
        """A cursor for a consumer that has the current rows: only rows stamped after `cursor` are new to it."""
        if mode is not TrackingMode.EMBEDDING:
            return cls(name, mode, cursor)
        copies = {
            each.shard: each.weight.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for table in tables
            for each in table.shards
        }
        return cls(name, mode, cursor, copies)

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


# -- reads; nothing waits on a CPU

# A shard, and global ids, values and digests of some of its rows, on the device of the table.
Gathered: TypeAlias = tuple[Shard, torch.Tensor, torch.Tensor, torch.Tensor | None]


def gather(table: TrackedTable, ids: torch.Tensor, memory: ReadMemory, *, values: bool) -> Iterator[Gathered]:
    """Copy the rows with these local ids on the table's device, by shard; without `values`, ids only."""
    # Without an offset, the ids are not copied.
    global_ids = ids + table.row_offset if table.row_offset else ids
    for tracked in table.shards:
        if not values:
            yield tracked.shard, global_ids, tracked.weight.new_empty(len(ids), 0), None
            continue
        rows = memory.select(tracked.weight, ids)
        # A GPU computes digests before the copy to the host, to protect it too. Otherwise the publisher does.
        digests = None if table.device.type == "cpu" else row_digests(rows, tracked.shard)
        yield tracked.shard, global_ids, rows, digests


def batch_on_host(shard: Shard, ids: torch.Tensor, values: torch.Tensor, digests: torch.Tensor | None) -> RowBatch:
    """Make a batch of gathered rows. On a GPU, their copies to host memory are only launched."""
    made = None if digests is None else to_host(digests).numpy().view(np.uint64)
    return RowBatch(shard, to_host(ids).numpy(), to_host(values).numpy(), digests=made)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory on the current stream; returns the same tensor if it is already there."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, eq=False)
class DueCount:
    """The number of rows due to a consumer, which the GPU counts ahead of a read."""

    cursor: int  # The count is of rows stamped later than this.
    counts: list[torch.Tensor]  # By table, int64 [1] in host memory, valid after `arrival`.
    written: list[int]  # `RowStamps.written` when the count was launched.
    arrival: torch.cuda.Event | None  # Event when the counts have arrived; None if they have.

    def bounds(self, rows: Sequence[int], written: Sequence[int]) -> list[int]:
        """By table, upper bounds of the rows stamped after the cursor, given all rows and `RowStamps.written` now.

        Waits for the GPU's work before the count, but not for later.
        """
        if self.arrival:
            self.arrival.synchronize()
        tables = zip(rows, self.counts, written, self.written, strict=True)
        return [min(most, int(count) + int(now) - then) for most, count, now, then in tables]


def due_ids(stamps: torch.Tensor, cursor: int, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rows stamped after a cursor, of which there are at most `bound`, without waiting for the device.

    Returns local ids, ascending, padded with zeros: int64 [bound]; and the number of due rows: int64 [1].
    """
    due = stamps > cursor
    return torch.nonzero_static(due, size=bound, fill_value=0).squeeze(1), due.sum().view(1)


# Widen words to 64 bits in blocks of this size, to save memory.
_BLOCK_WORDS = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def row_digests(rows: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The digests of rows [n, cols] of a shard, on their device: int64 [n] with the bits of uint64."""
    words = rows.contiguous().view(_WORDS[rows.element_size()])
    factors = _weights(first_word(shard.col_offset, shard.table.dtype), words.shape[1], rows.device)
    mask = (1 << 8 * words.element_size()) - 1
    blocks = torch.split(words, max(1, _BLOCK_WORDS // words.shape[1]))
    return torch.cat([((block.long() & mask) * factors).sum(dim=1) for block in blocks])  # Modulo 2**64.


@lru_cache(256)
def _weights(first: int, words: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(first, words).view("i8").copy()).to(device)
