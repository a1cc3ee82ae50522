"""A stamp for each row: the time of its last change, by a clock that ticks at every read.

A row that changes after a read has a later stamp than the cursor of the read. Stamps have 32 bits to save memory.
When the clock reaches their end, it restarts (`restart_clock`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.kernels import tracking
from deltasync.trainer.tracking.compared_rows import BITS, FollowedRows
from deltasync.trainer.tracking.gpu import ids_by_table
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.tracked_model import Lookup

# The cursor of a consumer without rows: every stamp is later, even that of a row that was never marked.
NOTHING = -1
STAMP_BYTES = 4
CLOCK_END = torch.iinfo(torch.int32).max

_NONE = torch.empty(0, dtype=torch.int64)
_NO_IDS = np.empty(0, np.int64)
_ID_TYPES = (torch.int32, torch.int64)


class RowStamps:
    """The stamps of the tables of a rank.

    Attributes:
        written: by table, the number of stamps written so far. Its growth is an upper bound of the rows stamped
            in the meantime.
    """

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        self._clock = Clock()
        self._marks = HostMarks([table.rows * (table.device.type == "cpu") for table in tables])
        self._stamps = [self._stamps_of(number, table) for number, table in enumerate(tables)]
        self.written = self._marks.counts[0]
        self._last_delete = dict[int, int]()  # Stamp of the last delete by table, to avoid needless scans.
        self._tables = tables
        # No lookup reveals when these tables change, so they are compared with copies.
        self._compared = {
            number: [FollowedRows(tracked.weight) for tracked in table.shards]
            for number, table in enumerate(tables)
            if table.compared
        }

    @property
    def clock(self) -> int:
        """The stamp for rows that change now."""
        return self._clock.now

    @clock.setter
    def clock(self, now: int) -> None:
        self._clock.now = now

    @property
    def stamps(self) -> list[torch.Tensor]:
        """`TableStamps.stamps` of each table."""
        return [each.stamps for each in self._stamps]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        copies = sum(followed.nbytes for by_shard in self._compared.values() for followed in by_shard)
        return sum(each.nbytes for each in self._stamps) + copies

    def places(self, lookups: Sequence[Lookup]) -> "LookupPlaces":
        """The position of each table's ids in a kernel's lookup."""
        keys, tables = 0, list[tuple[int, ...]]()
        for number, count in lookups:
            if number is not None:
                first_word, rows = self._marks.first_words[number], self._tables[number].rows
                tables.append((number, keys, keys + count, first_word, rows))
            keys += count
        only = lookups[0][0] if len(lookups) == 1 else None
        return LookupPlaces(keys, np.array(tables, np.int64).reshape(-1, 5), only)

    def stamp_lookup(self, places: "LookupPlaces", features: KeyedJaggedTensor) -> int:
        """Stamp the rows that a kernel has looked up, like `stamp`; return the number of ids."""
        ids = features.values()
        if ids.is_cuda:
            by_table = list(ids_by_table(features, places.tables, places.only))
            for table, of_table in by_table:
                self.stamp(table, of_table)
            return sum(len(of_table) for _, of_table in by_table)
        if not len(places.tables):
            return 0
        # The lookup has already computed the ends of bags. Keys with different numbers of bags need ends of keys.
        uneven = features.variable_stride_per_key()
        ends = as_numbers(torch.tensor(features.offset_per_key()) if uneven else features.offsets())
        bits, counts = self._marks.bits, self._marks.counts
        return tracking.mark_looked_up(as_numbers(ids), ends, places.keys, places.tables, bits, counts)

    def stamp(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (local ids of any integer type, in any order, with or without repetitions).

        An id outside the table stamps row 0, because FBGEMM trains that row instead.
        """
        self.written[table] += len(ids)
        self._stamps[table].mark(ids)

    def stamp_deleted(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (local ids, int64) as deleted. They must already be zero."""
        self._last_delete[table] = self.clock
        self._stamps[table].delete(ids)
        for followed in self._compared.get(table, ()):
            followed.copy.index_fill_(0, ids, 0)

    def stamp_all(self, table: int) -> None:
        """Stamp every row of a table."""
        self.written[table] += self._tables[table].rows
        self._stamps[table].mark_all()

    def stamp_present(self, table: int) -> None:
        """Stamp every row of a table that is not deleted."""
        self.written[table] += self._tables[table].rows
        self._stamps[table].mark_present()

    def stamp_refilled(self, table: int) -> None:
        """Stamp the deleted rows of a table that are no longer zero as new rows."""
        if table in self._last_delete:
            deleted = self._stamps[table].deleted_later(0)
            for tracked in self._tables[table].shards:
                self.stamp(table, deleted[tracked.weight[deleted].ne(0).any(dim=1)])

    def compare(self) -> None:
        """Compare rows with their copies, and stamp those that have changed."""
        for number, by_shard in self._compared.items():
            for tracked, followed in zip(self._tables[number].shards, by_shard, strict=True):
                if tracked.weight.is_cuda:
                    changed = followed.follow_all(tracked.weight)
                    self.written[number] += len(changed)
                    self._stamps[number].mark_where(changed)
                else:
                    self.stamp(number, followed.follow(tracked.weight))

    def restore(self, clock: int, stamps: Sequence[torch.Tensor]) -> None:
        """Replace all stamps and the clock. Later comparisons of rows are with their current values."""
        self.clock = clock
        self._replace(stamps)
        least = {number: int(theirs.min()) for number, theirs in enumerate(stamps) if len(theirs)}
        self._last_delete = {number: -stamp for number, stamp in least.items() if stamp < 0}
        for number, by_shard in self._compared.items():
            for tracked, followed in zip(self._tables[number].shards, by_shard, strict=True):
                followed.copy.copy_(tracked.weight)

    def later(self, table: int, cursor: int) -> torch.Tensor:
        """Local ids, ascending, of the rows stamped after `cursor` and not deleted: int64 [n]."""
        return self._stamps[table].later(cursor)

    def deleted_later(self, table: int, cursor: int) -> torch.Tensor:
        """Local ids, ascending, of the rows deleted after `cursor`: int64 [n].

        A consumer with cursor `NOTHING` gets all deletes, because it may have received rows without acknowledging
        them.
        """
        if self._last_delete.get(table, 0) <= max(cursor, 0):
            return _NONE
        return self._stamps[table].deleted_later(max(cursor, 0))

    def any_deleted_later(self, cursor: int) -> bool:
        """Whether rows of any table may have been deleted after `cursor`."""
        return max(self._last_delete.values(), default=0) > max(cursor, 0)

    def not_deleted(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """The local ids among `ids` whose rows are not deleted."""
        return ids[self._stamps[table].stamps[ids] >= 0]

    def deleted_of(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """The local ids among `ids` whose rows are deleted."""
        return ids[self._stamps[table].stamps[ids] < 0]

    def tick(self) -> int:
        """Return a cursor that includes all stamps so far; later stamps are greater."""
        for each in self._stamps:
            each.settle()
        cursor, self.clock = self.clock, self.clock + 1
        return cursor

    def restart_clock(self) -> None:
        """Restart the clock, and stamp every row as changed or deleted after a cursor of 0."""
        before, self.clock = self.stamps, 1
        self._last_delete = dict.fromkeys(self._last_delete, self.clock)
        self._replace([torch.where(stamps < 0, -self.clock, self.clock).int() for stamps in before])

    def _replace(self, stamps: Sequence[torch.Tensor]) -> None:
        for number, (ours, theirs) in enumerate(zip(self._stamps, stamps, strict=True)):
            self.written[number] += len(theirs)
            ours.replace(theirs)

    def _stamps_of(self, number: int, table: TrackedTable) -> "TableStamps":
        if table.device.type == "cpu":
            return HostStamps(table.rows, self._clock, *self._marks.of(number))
        return TableStamps(table.rows, self._clock, table.device)


@dataclass(frozen=True, eq=False)
class LookupPlaces:
    """The position of each table's ids in a lookup.

    Attributes:
        keys: number of keys of the lookup.
        tables: int64 [tables, 5], in the form that `kernels.tracking.mark_looked_up` takes.
        only: number of the table if the lookup has just one; None otherwise.
    """

    keys: int
    tables: NDArray[np.int64]
    only: int | None


class TableStamps:
    """The stamps of one table, int32 [rows]: time of a row's last change, 0 = never, negative = deleted then.

    Use within the gate. Ids are local. This class is for a GPU; `HostStamps` is faster in host memory.
    """

    def __init__(self, rows: int, clock: "Clock", device: torch.device) -> None:
        self._clock = clock
        self._stamps = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def stamps(self) -> torch.Tensor:
        """The stamps, including those of rows that are only marked so far. Read-only."""
        self.settle()
        return self._stamps

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._stamps.nbytes

    def mark(self, ids: torch.Tensor) -> None:
        """Stamp rows ([n] of any integer type, in any order, with or without repetitions).

        An id outside the table stamps row 0, because FBGEMM trains that row instead.
        """
        if ids.is_cuda:  # Another stream has allocated the ids and must not reuse their memory yet.
            ids.record_stream(torch.cuda.current_stream(ids.device))
        inside = torch.where((ids >= 0) & (ids < len(self._stamps)), ids, 0)
        self._stamps.index_fill_(0, inside.long(), self._clock.now)

    def settle(self) -> None:
        """Stamp the rows that are only marked so far."""

    def delete(self, ids: torch.Tensor) -> None:
        """Stamp rows (int64 [n]) as deleted."""
        self._stamps.index_fill_(0, ids, -self._clock.now)

    def mark_all(self) -> None:
        """Stamp every row."""
        self._stamps.fill_(self._clock.now)

    def mark_where(self, changed: torch.Tensor) -> None:
        """Stamp the rows of a bool mask [rows] without counting them, which would wait for a GPU."""
        self._stamps.masked_fill_(changed, self._clock.now)

    def mark_present(self) -> None:
        """Stamp every row that is not deleted."""
        self._stamps.copy_(torch.where(self._stamps < 0, self._stamps, self._clock.now))

    def replace(self, stamps: torch.Tensor) -> None:
        """Replace all stamps."""
        self._stamps.copy_(stamps)

    def later(self, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows stamped after `cursor` and not deleted: int64 [n]."""
        return torch.nonzero(self._stamps > cursor).squeeze(1)

    def deleted_later(self, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows deleted after `cursor`: int64 [n]."""
        return torch.nonzero(self._stamps < -cursor).squeeze(1)


class HostStamps(TableStamps):
    """Stamps in host memory: marking a row sets a bit, and the next read of the stamps stamps the marked rows.

    A mark costs a quarter of a stamp, because all bits fit in the processor's cache. For a consumer that has read
    all earlier stamps, the marked rows are the result, without reading other stamps. For other consumers, a read
    skips words of 64 rows without a later stamp.
    """

    def __init__(self, rows: int, clock: "Clock", bits: tracking.Marks, marked: NDArray[np.int64]) -> None:
        """Start without stamps. `bits` and `marked` are the table's part of `HostMarks`."""
        super().__init__(rows, clock, torch.device("cpu"))
        self._rows = self._stamps.numpy()
        self._marks, self._newest = bits, np.zeros(len(bits), np.int32)
        self._marked = marked
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return super().nbytes + self._marks.nbytes + self._newest.nbytes

    def mark(self, ids: torch.Tensor) -> None:
        """See `TableStamps`."""
        if len(self._rows):  # An empty table does not even have row 0.
            numbers = as_numbers(ids)
            tracking.mark(numbers, len(self._rows), self._marks)
            self._marked += len(numbers)

    def settle(self) -> None:
        """Stamp the rows that are only marked so far."""
        self._stamp_marked()

    def delete(self, ids: torch.Tensor) -> None:
        """See `TableStamps`."""
        self.settle()
        super().delete(ids)
        self._newest[ids.numpy() // tracking.WORD_ROWS] = self._clock.now
        self._largest = self._clock.now

    def mark_all(self) -> None:
        """See `TableStamps`."""
        self.settle()
        super().mark_all()
        self._renew()

    def mark_present(self) -> None:
        """See `TableStamps`."""
        self.settle()
        super().mark_present()
        self._renew()

    def replace(self, stamps: torch.Tensor) -> None:
        """See `TableStamps`."""
        self.settle()
        super().replace(stamps)
        self._renew()

    def later(self, cursor: int) -> torch.Tensor:
        """See `TableStamps`."""
        before, marked = self._largest, self._stamp_marked()
        return torch.from_numpy(marked if cursor >= before else self._list_later(cursor, 1))

    def deleted_later(self, cursor: int) -> torch.Tensor:
        """See `TableStamps`."""
        self.settle()
        return torch.from_numpy(self._list_later(cursor, -1))

    def _stamp_marked(self) -> tracking.Ids:
        """Stamp the marked rows; return their ids."""
        marked = int(self._marked[0])
        if not marked:
            return _NO_IDS
        ids = np.empty(min(marked, len(self._rows)), np.int64)
        self._marked[0], self._largest = 0, self._clock.now
        return ids[: tracking.settle(self._marks, self._largest, self._rows, self._newest, ids)]

    def _list_later(self, cursor: int, sign: int) -> tracking.Ids:
        # Allocate the maximum, because untouched pages cost no memory.
        ids = np.empty(np.count_nonzero(self._newest > cursor) * tracking.WORD_ROWS, np.int64)
        return ids[: tracking.list_later(self._rows, self._newest, cursor, sign, ids)]

    def _renew(self) -> None:
        tracking.find_newest(self._rows, self._newest)
        self._largest = int(self._newest.max(initial=0))


class HostMarks:
    """A bit for each row in host memory: whether it has changed since its stamp was last read.

    The bits of all tables are in one array, so that one call can mark the rows of all tables of a lookup.

    Attributes:
        bits: uint64 [words], table by table.
        first_words: by table, the index of its first word.
        counts: int64 [2, tables]: upper bounds of the rows ever marked, and marked since stamps were last read.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        """Start without marks. `rows` is the number of rows of each table."""
        self.first_words = [0, *accumulate(-(-each // tracking.WORD_ROWS) for each in rows)]
        self.bits = np.zeros(self.first_words[-1], np.uint64)
        self.counts = np.zeros((2, len(rows)), np.int64)

    def of(self, table: int) -> tuple[tracking.Marks, NDArray[np.int64]]:
        """A table's bits [words], and the number of rows marked since its stamps were last read [1]."""
        first, end = self.first_words[table : table + 2]
        return self.bits[first:end], self.counts[1, table : table + 1]


@dataclass
class Clock:
    """The clock that all tables of a rank share; `now` is the stamp for rows that change now."""

    now: int = 1


def as_numbers(ids: torch.Tensor) -> NDArray[np.signedinteger]:
    """Convert ids [n] of any integer type for kernels: to contiguous int32 or int64."""
    supported = ids if ids.dtype in _ID_TYPES and ids.is_contiguous() else ids.long().contiguous()
    numbers: NDArray[np.signedinteger] = supported.numpy()
    return numbers


def forget(rows: torch.Tensor, ids: torch.Tensor | slice) -> None:
    """Fill rows with a NaN whose bits no computation produces, so that no row of a model equals it."""
    rows.view(BITS[rows.element_size()])[ids] = -1
