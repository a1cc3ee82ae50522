"""Which rows of a table's arrays were written since they were last flushed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from deltasync.core.rows import Ids
from deltasync.kernels import touched as kernels
from deltasync.kernels.touched import Marks

MAX_ARRAYS = 16
# What a row that is written may take to the disk with it.
_BLOCK_BYTES = 4096
_LARGEST_SHIFT = 6


class Touched:
    """The blocks of rows that were written, for up to 16 arrays of as many rows: an array is a bit. Any thread.

    A row is noted after it was written. A flush takes the notes before it reads rows: of one that is written
    meanwhile it may put a part into the file, which is noted once more, and which the log has whole.

    Attributes:
        shift: a block has 2**shift rows.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        """For arrays of `rows` rows, which take `row_bytes` bytes in the largest of them, or about so many."""
        self.shift = min(_LARGEST_SHIFT, max(0, (_BLOCK_BYTES // max(1, row_bytes)).bit_length() - 1))
        self._flushing = threading.Lock()
        self._marks = np.zeros(-(-rows >> self.shift), np.uint16)
        self._taken = np.zeros_like(self._marks[:0])
        self._lock = threading.Lock()

    def note(self, ids: Ids, bits: int) -> None:
        """Note that the rows `ids` ([n]) of some arrays were written."""
        ids = np.require(ids, np.int64, ["C", "A"])
        with self._lock:
            kernels.touch(ids, self.shift, bits, self._marks)

    def note_all(self, bits: int) -> None:
        """Note that all rows of some arrays were written."""
        with self._lock:
            self._marks |= np.uint16(bits)

    def add(self, marks: Marks) -> None:
        """Note what was noted of arrays that had as many rows, or fewer."""
        with self._lock:
            self._marks[: len(marks)] |= marks

    @contextmanager
    def taken(self, bits: int) -> Iterator[Marks]:
        """What was noted of some arrays, by block, while it is brought to the disk; if that fails, it is noted
        again. One flush at a time: what another has taken is on disk before this one is through.
        """
        with self._flushing:
            with self._lock:
                self._taken = self._marks & np.uint16(bits)
                self._marks &= np.uint16(~bits & 0xFFFF)
            try:
                yield self._taken
            except BaseException:
                self.add(self._taken)
                raise
            finally:
                with self._lock:
                    self._taken = self._marks[:0]

    def pending(self) -> Marks:
        """What may not be on disk, by block."""
        with self._lock:
            pending = self._marks.copy()
            pending[: len(self._taken)] |= self._taken
            return pending
