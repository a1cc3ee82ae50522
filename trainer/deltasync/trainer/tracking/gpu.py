"""Tables on a GPU: the order of streams, asynchronous reads, and digests on the device.

Everything except `Streams` also works on a CPU, for tests; nothing waits there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.core.digests import first_word, weights
from deltasync.core.tables import Shard
from deltasync.trainer.tracking.delta import DeletedRows, Delta, DeltaRows, Token


class Streams:
    """The order between the streams that change rows or stamps and the one that reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._read: torch.cuda.Event | None = None

    def before_reads(self) -> None:
        """Make reads run after all work launched on this thread's stream so far."""
        stream = torch.cuda.current_stream(self._device)
        self._changed[stream] = stream.record_event()

    def after_reads(self) -> None:
        """Make work launched on this thread's stream from now on run after the last read."""
        if self._read:
            torch.cuda.current_stream(self._device).wait_event(self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Launch the reads of the block on the side stream, after all changes."""
        for event in self._changed.values():
            self._side.wait_event(event)
        with torch.cuda.stream(self._side):
            try:
                yield
            finally:
                self._read = self._side.record_event()

    @contextmanager
    def copying(self, *, wait: bool) -> Iterator[None]:
        """Launch the block's copies to the host on the side stream; with `wait`, wait for them at the end."""
        with torch.cuda.stream(self._side):
            yield
        if wait:
            self._side.synchronize()

    def arrival(self) -> torch.cuda.Event:
        """Record an event after all work on the side stream so far."""
        arrival: torch.cuda.Event = self._side.record_event()
        return arrival


class LaunchedDelta(Delta):
    """A delta whose rows are still being copied to host memory.

    When a read is launched, only an upper bound of the number of due rows is known. The copy therefore ends with
    rows that are not due, and the exact count arrives with it.
    """

    def __init__(
        self,
        rows: Mapping[str, DeltaRows],
        counts: Mapping[str, torch.Tensor],
        token: Token,
        deletes: Mapping[str, DeletedRows],
        arrival: torch.cuda.Event | None,
    ) -> None:
        """Take over copies in progress.

        Args:
            rows: by FQN, rows that are being copied to host memory, the due rows first.
            counts: by FQN, number of due rows: int64 [1], also being copied.
            token: the delta's token.
            deletes: the delta's deletes.
            arrival: event at the end of all copies; None if they are complete.
        """
        super().__init__(rows, token, deletes)
        self._counts, self._arrival = counts, arrival

    @property
    def arrived(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._arrival is None or bool(self._arrival.query())  # type: ignore[no-untyped-call]

    @property
    def result(self) -> Delta:
        """This delta, after waiting until its rows are in host memory."""
        if self._arrival:
            self._arrival.synchronize()
            self._arrival = None
        if self._counts:
            due = {fqn: trimmed(rows, int(self._counts[fqn])) for fqn, rows in self.rows.items()}
            self.rows, self._counts = {fqn: rows for fqn, rows in due.items() if len(rows.ids)}, {}
        return self


def trimmed(rows: DeltaRows, count: int) -> DeltaRows:
    """Keep the first `count` rows.

    Raises:
        RuntimeError: there are fewer.
    """
    if count > len(rows.ids):
        raise RuntimeError(f"{count} rows are due, at most {len(rows.ids)} were expected: this is a defect")
    values, digests = ([each[:count] for each in both] for both in (rows.shard_values, rows.shard_digests))
    return replace(rows, ids=rows.ids[:count], shard_values=values, shard_digests=digests)


def rows_to_host(rows: DeltaRows) -> DeltaRows:
    """Copy rows to host memory on the current stream; returns the same object if they are already there."""
    if not rows.ids.is_cuda:
        return rows
    values, digests = ([to_host(each) for each in both] for both in (rows.shard_values, rows.shard_digests))
    return replace(rows, ids=to_host(rows.ids), shard_values=values, shard_digests=digests)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory on the current stream; returns the same tensor if it is already there."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, eq=False)
class DueCount:
    """The number of rows due to a consumer, which the GPU counts ahead of a read.

    Attributes:
        cursor: the count is of rows stamped later than this.
        counts: by table, int64 [1] in host memory, valid after `arrival`.
        written: `RowStamps.written` when the count was launched.
        arrival: event when the counts have arrived; None if they have.
    """

    cursor: int
    counts: list[torch.Tensor]
    written: list[int]
    arrival: torch.cuda.Event | None

    def bounds(self, rows: Sequence[int], written: Sequence[int]) -> list[int]:
        """Upper bounds of the number of rows now stamped after the cursor, by table.

        Waits for GPU work launched before the count, but not for later work.

        Args:
            rows: by table, number of rows.
            written: the current `RowStamps.written`.
        """
        if self.arrival:
            self.arrival.synchronize()
        tables = zip(rows, self.counts, written, self.written, strict=True)
        return [min(most, int(count) + int(now) - then) for most, count, now, then in tables]


def due_ids(stamps: torch.Tensor, cursor: int, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rows stamped after a cursor, without waiting for the device.

    Args:
        stamps: int32 [rows].
        cursor: rows with later stamps are due.
        bound: upper bound of the number of due rows.

    Returns:
        Local ids of the due rows, ascending, padded with zeros: int64 [bound]; and the number of due rows:
        int64 [1].
    """
    due = stamps > cursor
    return torch.nonzero_static(due, size=bound, fill_value=0).squeeze(1), due.sum().view(1)


def ids_by_table(
    features: KeyedJaggedTensor, tables: NDArray[np.int64], only: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the ids of a lookup by table number. `tables` and `only` are those of `stamps.LookupPlaces`."""
    ids = features.values()
    if only is not None:  # Do not ask for the ends of keys, which would wait for a GPU.
        yield only, ids
        return
    ends = features.offset_per_key()
    for number, first, end in tables[:, :3].tolist():
        yield number, ids[ends[first] : ends[end]]


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
