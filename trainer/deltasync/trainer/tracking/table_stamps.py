"""The stamps of one table, wherever it is, and those of a table in host memory, which marks precede."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.kernels import marks

_NONE = np.empty(0, np.int64)
_ID_TYPES = (torch.int32, torch.int64)


def as_numbers(ids: torch.Tensor) -> NDArray[np.signedinteger]:
    """Ids [n] of any integer type as kernels take them: side by side, of 32 or 64 bits."""
    known = ids if ids.dtype in _ID_TYPES and ids.is_contiguous() else ids.long().contiguous()
    numbers: NDArray[np.signedinteger] = known.numpy()
    return numbers


@dataclass
class Clock:
    """What rows are stamped with now: `now`."""

    now: int = 1


class TableStamps:
    """A stamp per row, int32 [rows]: when it last changed, 0 = never; where it was deleted then, the opposite.

    Within the gate. Local ids everywhere.
    """

    def __init__(self, rows: int, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._stamps = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def stamps(self) -> torch.Tensor:
        """The stamps, with all that has changed by now. Not to be written to."""
        self.settle()
        return self._stamps

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._stamps.nbytes

    def mark(self, ids: torch.Tensor) -> None:
        """Stamp rows ([n] of any integer type, in any order and number).

        An id outside of the table stamps row 0, which FBGEMM trains in its place.
        """
        if ids.is_cuda:  # Allocated on another stream, which must not reuse their memory yet.
            ids.record_stream(torch.cuda.current_stream(ids.device))
        inside = torch.where((ids >= 0) & (ids < len(self._stamps)), ids, 0)
        self._stamps.index_fill_(0, inside.long(), self._clock.now)

    def settle(self) -> None:
        """Stamp what is only marked by now."""

    def delete(self, ids: torch.Tensor) -> None:
        """Stamp rows (int64 [n]) as deleted."""
        self._stamps.index_fill_(0, ids, -self._clock.now)

    def mark_all(self) -> None:
        """Stamp every row."""
        self._stamps.fill_(self._clock.now)

    def mark_where(self, changed: torch.Tensor) -> None:
        """Stamp the rows of a mask, bool [rows], where it is not known how many they are. On a GPU alone."""
        self._stamps.masked_fill_(changed, self._clock.now)

    def mark_present(self) -> None:
        """Stamp every row that is not deleted."""
        self._stamps.copy_(torch.where(self._stamps < 0, self._stamps, self._clock.now))

    def replace(self, stamps: torch.Tensor) -> None:
        """Go on from other stamps."""
        self._stamps.copy_(stamps)

    def later(self, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows stamped after `cursor` and not deleted: int64 [n]."""
        return torch.nonzero(self._stamps > cursor).squeeze(1)

    def deleted_later(self, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows deleted after `cursor`: int64 [n]."""
        return torch.nonzero(self._stamps < -cursor).squeeze(1)


class HostMarks:
    """Which rows of tables in host memory have changed since somebody last looked at their stamps: a bit for each.

    The bits of all tables lie side by side, so that one call marks the rows of all tables of a lookup.

    Attributes:
        bits: uint64 [words], table by table.
        first_words: by table, where its bits begin.
        counts: int64 [2, tables]: at most how many rows were marked, ever, and since somebody last looked.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        """None is marked, of tables of so many rows."""
        self.first_words = [0, *accumulate(-(-each // marks.WORD_ROWS) for each in rows)]
        self.bits = np.zeros(self.first_words[-1], np.uint64)
        self.counts = np.zeros((2, len(rows)), np.int64)

    def of(self, table: int) -> tuple[marks.Marks, NDArray[np.int64]]:
        """A table's bits [words], and how many rows were marked since somebody last looked at them [1]."""
        first, end = self.first_words[table : table + 2]
        return self.bits[first:end], self.counts[1, table : table + 1]


class HostStamps(TableStamps):
    """Stamps in host memory: rows are marked with a bit, and the next look at the stamps stamps them.

    A mark costs a quarter of a stamp, since all bits fit the processor's cache. A consumer that has read what was
    stamped before is given the rows marked, without a look at the others; for any other, words of rows whose
    largest stamp it knows are left out.
    """

    def __init__(self, rows: int, clock: Clock, bits: marks.Marks, marked: NDArray[np.int64]) -> None:
        """Nothing is stamped. `bits` and `marked` are the table's part of `HostMarks`."""
        super().__init__(rows, clock, torch.device("cpu"))
        self._rows = self._stamps.numpy()
        self._marks, self._newest = bits, np.zeros(len(bits), np.int32)
        self._marked = marked
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return super().nbytes + self._marks.nbytes + self._newest.nbytes

    def mark(self, ids: torch.Tensor) -> None:
        """As for any table."""
        if len(self._rows):  # Else there is no row 0 either.
            numbers = as_numbers(ids)
            marks.mark(numbers, len(self._rows), self._marks)
            self._marked += len(numbers)

    def settle(self) -> None:
        """Stamp what is only marked by now."""
        self._take_marked()

    def delete(self, ids: torch.Tensor) -> None:
        """As for any table."""
        self.settle()
        super().delete(ids)
        self._newest[ids.numpy() // marks.WORD_ROWS] = self._clock.now
        self._largest = self._clock.now

    def mark_all(self) -> None:
        """As for any table."""
        self.settle()
        super().mark_all()
        self._renew()

    def mark_present(self) -> None:
        """As for any table."""
        self.settle()
        super().mark_present()
        self._renew()

    def replace(self, stamps: torch.Tensor) -> None:
        """As for any table."""
        self.settle()
        super().replace(stamps)
        self._renew()

    def later(self, cursor: int) -> torch.Tensor:
        """As for any table."""
        before, marked = self._largest, self._take_marked()
        return torch.from_numpy(marked if cursor >= before else self._list_later(cursor, 1))

    def deleted_later(self, cursor: int) -> torch.Tensor:
        """As for any table."""
        self.settle()
        return torch.from_numpy(self._list_later(cursor, -1))

    def _take_marked(self) -> marks.Ids:
        """Stamp the rows that are marked; their ids."""
        marked = int(self._marked[0])
        if not marked:
            return _NONE
        ids = np.empty(min(marked, len(self._rows)), np.int64)
        self._marked[0], self._largest = 0, self._clock.now
        return ids[: marks.settle(self._marks, self._largest, self._rows, self._newest, ids)]

    def _list_later(self, cursor: int, sign: int) -> marks.Ids:
        # Memory that nobody touches is not taken.
        ids = np.empty(np.count_nonzero(self._newest > cursor) * marks.WORD_ROWS, np.int64)
        return ids[: marks.list_later(self._rows, self._newest, cursor, sign, ids)]

    def _renew(self) -> None:
        marks.find_newest(self._rows, self._newest)
        self._largest = int(self._newest.max(initial=0))
