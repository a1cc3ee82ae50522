"""A stamp for each row: the time of its last change, by a clock that ticks at every read.

A row that changes after a read has a later stamp than the cursor of the read. Stamps have 32 bits to save memory.
When the clock reaches their end, it restarts (`restart_clock`).
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.kernels import tracking
from deltasync.trainer.tracking.compared_rows import FollowedRows
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.tracked_model import Lookup

# The cursor of a consumer without rows: every stamp is later, even that of a row that was never marked.
NOTHING = -1
STAMP_BYTES = 4
CLOCK_END = torch.iinfo(torch.int32).max

_NONE = torch.empty(0, dtype=torch.int64)
_ID_TYPES = (torch.int32, torch.int64)


class RowStamps:
    """The stamps of the tables of a rank. Ids are local. Use within the gate.

    Attributes:
        written: by table, the number of stamps written so far. Its growth is an upper bound of the rows stamped
            in the meantime.
    """

    def __init__(self, tables: Sequence[TrackedTable]) -> None:
        self._tables = tables
        on_host = [table.device.type == "cpu" for table in tables]
        words = (-(-table.rows // tracking.WORD_ROWS) * host for table, host in zip(tables, on_host, strict=True))
        self._first_words = [0, *accumulate(words)]
        # The bits of all tables are in one array, so that one call can mark the rows of all tables of a lookup.
        self._bits = np.zeros(self._first_words[-1], np.uint64)
        # By table, upper bounds of the rows ever marked, and marked since the stamps were last read.
        self._counts = np.zeros((2, len(tables)), np.int64)
        self.written = self._counts[0]
        self._stamps = [
            HostStamps(table.rows, self._bits[slice(*self._first_words[n : n + 2])], self._counts[1, n : n + 1])
            if on_host[n]
            else TableStamps(table.rows, table.device)
            for n, table in enumerate(tables)
        ]
        self.clock = 1
        self._last_delete = dict[int, int]()  # Stamp of the last delete by table, to avoid needless scans.
        # No lookup reveals when these tables change, so they are compared with copies.
        self._compared = {
            number: [FollowedRows(tracked.weight) for tracked in table.shards]
            for number, table in enumerate(tables)
            if table.compared
        }

    @property
    def clock(self) -> int:
        """The stamp for rows that change now."""
        return self._clock

    @clock.setter
    def clock(self, now: int) -> None:
        self._clock = now
        for each in self._stamps:
            each.clock = now

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        copies = sum(followed.nbytes for by_shard in self._compared.values() for followed in by_shard)
        return sum(each.nbytes for each in self._stamps) + copies

    def places(self, lookups: Sequence[Lookup]) -> NDArray[np.int64]:
        """The position of each table's ids in a kernel's lookup, for `stamp_lookup`."""
        key, places = 0, list[tuple[int, ...]]()
        for number, keys in lookups:
            if number is not None:
                places.append((number, key, key + keys, self._first_words[number], self._tables[number].rows))
            key += keys
        return np.array(places, np.int64).reshape(-1, 5)

    def of(self, table: int) -> torch.Tensor:
        """The stamps of a table, int32 [rows]. Read-only."""
        return self._stamps[table].settled()

    def stamp_lookup(self, places: NDArray[np.int64], features: KeyedJaggedTensor) -> int:
        """Stamp the rows that a kernel has looked up, like `stamp`; return the number of ids."""
        if not len(places):
            return 0
        ids, keys = features.values(), len(features.keys())
        if ids.is_cuda:
            # With one table, do not ask for the ends of keys, which may wait for the GPU.
            alone = len(places) == 1 and places[0, 2] - places[0, 1] == keys
            ends = {0: 0, keys: len(ids)} if alone else features.offset_per_key()
            by_table = [(number, ids[ends[first] : ends[end]]) for number, first, end in places[:, :3].tolist()]
            for number, of_table in by_table:
                self.stamp(number, of_table)
            return sum(len(of_table) for _, of_table in by_table)
        # The lookup has already computed the ends of bags. Keys with different numbers of bags need ends of keys.
        uneven = features.variable_stride_per_key()
        key_ends = _as_numbers(torch.tensor(features.offset_per_key()) if uneven else features.offsets())
        return tracking.mark_looked_up(_as_numbers(ids), key_ends, keys, places, self._bits, self._counts)

    def stamp(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows ([n] of any integer type, in any order, with or without repetitions).

        An id outside the table stamps row 0, because FBGEMM trains that row instead.
        """
        self.written[table] += len(ids)
        self._stamps[table].mark(ids)

    def stamp_deleted(self, table: int, ids: torch.Tensor) -> None:
        """Stamp rows (int64) as deleted. They must already be zero."""
        self._last_delete[table] = self.clock
        self._stamps[table].delete(ids)
        for followed in self._compared.get(table, ()):
            followed.copy.index_fill_(0, ids, 0)

    def stamp_all(self, table: int) -> None:
        """Stamp every row of a table."""
        self._replace(table, self.clock)

    def stamp_present(self, table: int) -> None:
        """Stamp every row of a table, except deleted rows that are still zeros."""
        if table not in self._last_delete:
            self.stamp_all(table)
            return
        deleted, stamps = self.deleted_later(table, 0), self.of(table)
        self._replace(table, stamps.masked_fill(stamps >= 0, self.clock))
        for tracked in self._tables[table].shards:
            self.stamp(table, deleted[tracked.weight[deleted].ne(0).any(dim=1)])

    def compare(self) -> None:
        """Compare rows with their copies, and stamp those that have changed."""
        for number, by_shard in self._compared.items():
            for tracked, followed in zip(self._tables[number].shards, by_shard, strict=True):
                if tracked.weight.is_cuda:  # Listing or counting the rows would wait for the GPU.
                    changed = followed.follow_all(tracked.weight)
                    self._replace(number, self.of(number).masked_fill(changed, self.clock))
                else:
                    self.stamp(number, followed.follow(tracked.weight))

    def restore(self, clock: int, stamps: Sequence[torch.Tensor]) -> None:
        """Replace all stamps and the clock. Later comparisons of rows are with their current values."""
        self.clock = clock
        for number, theirs in enumerate(stamps):
            self._replace(number, theirs)
        least = {number: int(theirs.min()) for number, theirs in enumerate(stamps) if len(theirs)}
        self._last_delete = {number: -stamp for number, stamp in least.items() if stamp < 0}
        for number, by_shard in self._compared.items():
            for tracked, followed in zip(self._tables[number].shards, by_shard, strict=True):
                followed.copy.copy_(tracked.weight)

    def later(self, table: int, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows stamped after `cursor` and not deleted: int64 [n]."""
        return self._stamps[table].later(cursor)

    def due(self, table: int, cursor: int) -> torch.Tensor:
        """Like `later`, without the free rows of a map for a consumer without rows: they are zero by default."""
        ids = self._stamps[table].later(cursor)
        if not self._tables[table].table.of or cursor != NOTHING:
            return ids
        in_use = self._tables[table].shards[0].weight.any(dim=1)  # Does not copy the rows.
        in_use[-1] = True  # A table without any rows would count as unpublished.
        return ids[in_use[ids]]

    def deleted_later(self, table: int, cursor: int) -> torch.Tensor:
        """Ids, ascending, of the rows deleted after `cursor`: int64 [n].

        A consumer with cursor `NOTHING` gets all deletes, because it may have received rows without acknowledging
        them.
        """
        if self._last_delete.get(table, 0) <= max(cursor, 0):
            return _NONE
        return self._stamps[table].deleted_later(max(cursor, 0))

    def tick(self) -> int:
        """Return a cursor that includes all stamps so far; later stamps are greater."""
        for each in self._stamps:
            each.settled()
        self.clock += 1
        return self.clock - 1

    def restart_clock(self) -> None:
        """Restart the clock, and stamp every row as changed or deleted after a cursor of 0."""
        before, self.clock = [each.settled() for each in self._stamps], 1
        self._last_delete = dict.fromkeys(self._last_delete, self.clock)
        for number, stamps in enumerate(before):
            self._replace(number, stamps.sign().masked_fill_(stamps == 0, 1))

    def _replace(self, table: int, stamps: torch.Tensor | int) -> None:
        self.written[table] += self._tables[table].rows
        self._stamps[table].replace(stamps)


class TableStamps:
    """The stamps of one table, int32 [rows]: time of a row's last change, 0 = never, negative = deleted then.

    For a GPU; `HostStamps` is faster in host memory.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.clock = 1  # The stamp for rows that change now.
        self._stamps = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._stamps.nbytes

    def settled(self) -> torch.Tensor:
        """The stamps, including those of rows that are only marked so far. Read-only."""
        return self._stamps

    def mark(self, ids: torch.Tensor) -> None:
        """Stamp rows, see `RowStamps.stamp`."""
        if ids.is_cuda:  # Another stream has allocated the ids and must not reuse their memory yet.
            ids.record_stream(torch.cuda.current_stream(ids.device))
        # `torch.where` would copy the 0 to the GPU, and wait.
        inside = ids.masked_fill((ids < 0) | (ids >= len(self._stamps)), 0)
        self._stamps.index_fill_(0, inside.long(), self.clock)

    def delete(self, ids: torch.Tensor) -> None:
        """Stamp rows (int64 [n]) as deleted."""
        self._stamps.index_fill_(0, ids, -self.clock)

    def replace(self, stamps: torch.Tensor | int) -> None:
        """Replace all stamps, by one number or by those of each row."""
        if isinstance(stamps, int):
            self._stamps.fill_(stamps)
        else:
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

    def __init__(self, rows: int, bits: tracking.Marks, marked: NDArray[np.int64]) -> None:
        """Start without stamps. `bits` [words] are for marks, `marked` [1] for an upper bound of their number."""
        super().__init__(rows, torch.device("cpu"))
        self._rows = self._stamps.numpy()
        self._bits, self._marked = bits, marked
        self._newest = np.zeros(len(bits), np.int32)
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return super().nbytes + self._bits.nbytes + self._newest.nbytes

    def settled(self) -> torch.Tensor:
        """See `TableStamps`."""
        self._stamp_marked()
        return self._stamps

    def mark(self, ids: torch.Tensor) -> None:
        """See `TableStamps`."""
        if len(self._rows):  # An empty table does not even have row 0.
            tracking.mark(_as_numbers(ids), len(self._rows), self._bits)
            self._marked += len(ids)

    def delete(self, ids: torch.Tensor) -> None:
        """See `TableStamps`."""
        self._stamp_marked()
        super().delete(ids)
        self._newest[ids.numpy() // tracking.WORD_ROWS] = self.clock
        self._largest = self.clock

    def replace(self, stamps: torch.Tensor | int) -> None:
        """See `TableStamps`."""
        self._stamp_marked()
        super().replace(stamps)
        tracking.find_newest(self._rows, self._newest)
        self._largest = int(self._newest.max(initial=0))

    def later(self, cursor: int) -> torch.Tensor:
        """See `TableStamps`."""
        before, marked = self._largest, self._stamp_marked()
        return torch.from_numpy(marked if cursor >= before else self._list_later(cursor, 1))

    def deleted_later(self, cursor: int) -> torch.Tensor:
        """See `TableStamps`."""
        self._stamp_marked()
        return torch.from_numpy(self._list_later(cursor, -1))

    def _stamp_marked(self) -> tracking.Ids:
        """Stamp the marked rows; return their ids."""
        ids = np.empty(min(int(self._marked[0]), len(self._rows)), np.int64)
        if not len(ids):
            return ids
        self._marked[0], self._largest = 0, self.clock
        return ids[: tracking.settle(self._bits, self.clock, self._rows, self._newest, ids)]

    def _list_later(self, cursor: int, sign: int) -> tracking.Ids:
        # Allocate the maximum, because untouched pages cost no memory.
        ids = np.empty(np.count_nonzero(self._newest > cursor) * tracking.WORD_ROWS, np.int64)
        return ids[: tracking.list_later(self._rows, self._newest, cursor, sign, ids)]


def _as_numbers(ids: torch.Tensor) -> NDArray[np.signedinteger]:
    """Convert ids [n] of any integer type for kernels: to contiguous int32 or int64."""
    supported = ids if ids.dtype in _ID_TYPES and ids.is_contiguous() else ids.long().contiguous()
    numbers: NDArray[np.signedinteger] = supported.numpy()
    return numbers
