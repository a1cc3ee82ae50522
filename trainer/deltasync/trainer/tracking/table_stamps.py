"""The stamps of one table, wherever it is, and those of a table in host memory, which marks precede."""

from dataclasses import dataclass

import numpy as np
import torch

from deltasync.kernels import marks

_ALL = slice(None)
_NONE = np.empty(0, np.int64)
_ID_TYPES = (torch.int32, torch.int64)


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

    def mark(self, ids: torch.Tensor, part: slice = _ALL) -> None:
        """Stamp rows (a part of `ids`, [n] of any integer type, in any order and number).

        An id outside of the table stamps row 0, which FBGEMM trains in its place.
        """
        rows = ids[part]
        if rows.is_cuda:  # Allocated on another stream, which must not reuse their memory yet.
            rows.record_stream(torch.cuda.current_stream(rows.device))
        inside = torch.where((rows >= 0) & (rows < len(self._stamps)), rows, 0)
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


class HostStamps(TableStamps):
    """Stamps in host memory: rows are marked with a bit, and the next look at the stamps stamps them.

    A mark costs a quarter of a stamp, since all bits fit the processor's cache. A consumer that has read what was
    stamped before is given the rows marked, without a look at the others; for any other, words of rows whose
    largest stamp it knows are left out.
    """

    def __init__(self, rows: int, clock: Clock) -> None:
        super().__init__(rows, clock, torch.device("cpu"))
        words = -(-rows // marks.WORD_ROWS)
        self._rows = self._stamps.numpy()
        self._marks, self._newest = np.zeros(words, np.uint64), np.zeros(words, np.int32)
        self._marked = 0
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return super().nbytes + self._marks.nbytes + self._newest.nbytes

    def mark(self, ids: torch.Tensor, part: slice = _ALL) -> None:
        """As for any table."""
        known = ids if ids.dtype in _ID_TYPES and ids.is_contiguous() else ids.long().contiguous()
        rows = known.numpy()[part]
        if len(self._rows):  # Else there is no row 0 either.
            marks.mark(rows, len(self._rows), self._marks)
            self._marked += len(rows)

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
        if not self._marked:
            return _NONE
        ids = np.empty(min(self._marked, len(self._rows)), np.int64)
        self._marked, self._largest = 0, self._clock.now
        return ids[: marks.settle(self._marks, self._largest, self._rows, self._newest, ids)]

    def _list_later(self, cursor: int, sign: int) -> marks.Ids:
        # Memory that nobody touches is not taken.
        ids = np.empty(np.count_nonzero(self._newest > cursor) * marks.WORD_ROWS, np.int64)
        return ids[: marks.list_later(self._rows, self._newest, cursor, sign, ids)]

    def _renew(self) -> None:
        marks.find_newest(self._rows, self._newest)
        self._largest = int(self._newest.max(initial=0))
