"""Tables on a GPU: the order of streams, asynchronous reads, and digests on the device.

Everything except `Streams` also works on a CPU, for tests; nothing waits there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from deltasync.core.digests import first_word, weights
from deltasync.core.tables import Shard


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
        """Upper bounds of the number of rows now stamped after the cursor, by table, given their rows.

        `written` is the current `RowStamps.written`. Waits for the GPU's work before the count, but not for later.
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
