"""Rows with a stamp on every row: the one idea every hop is built on.

"What does X still lack?" is `rows whose stamp > X's version`, always answered with sorted unique ids
and their current values. Of a row that was deleted, the stamp is the negative of the number.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.base.threads import in_shares
from deltasync.core.changes import ChangeCounts, ChangeIndex, Stamps
from deltasync.core.digests import RowDigests, first_word, row_digests, sum_of_squares, weights, words_of
from deltasync.core.rows import BLOCK_ROWS, DamagedRows, Ids, Mask, RowBatch, Values, contiguous
from deltasync.core.table_memory import RAM, TableMemory
from deltasync.core.tables import Shard, TableSpec
from deltasync.kernels import digests as digest_kernels
from deltasync.kernels import rows as row_kernels

Slots: TypeAlias = NDArray[np.int64]

# Stamps are scanned in blocks so that a scan's scratch memory stays in the processor's cache.
_SCAN_ROWS = 1 << 20
# Once a sum has shrunk to this share of what it was, rounding has eaten the rest of it.
_EXACT_SHARE = 2.0**-30
# No stamp is as large, which leaves room for sums and differences of two of them.
_IMPOSSIBLE = 1 << 62
# For each row besides its values: its stamp and its digest.
_ROW_BYTES = 16
_FLAT: list[Literal["C"]] = ["C"]  # As kernels take arrays, which may begin at any byte.
_NO_WEIGHTS, _NO_FLOATS = np.zeros(0, np.uint64), np.zeros((0, 0), np.float32)


def has_norm(spec: TableSpec) -> bool:
    """Whether a table has a norm."""
    return spec.kind.trained and spec.dtype.kind == "f"


def table_bytes(spec: TableSpec) -> int:
    """Bytes of the arrays of a table."""
    return spec.rows * (spec.dim * spec.dtype.itemsize + _ROW_BYTES)


class StampedTable:
    """The rows of one table, the version at which each last changed, and the digest of each.

    Used on the thread that changes it, except for `spec`, `counts` and where it is said.

    Attributes:
        spec: what the table is.
        rows: [N, D] values, in the table's dtype, by slot.
        stamps: [N] int64, by slot; 0 = never changed, negative = deleted then.
        digests: [N] uint64, by slot, of the rows as they were given or are held by replicas.
        counts: of the stamps; any thread may read them.
        index: finds the slots of rows that are stamped after a number.
        checksum: of all rows; see `core.digests`.
        before_change: called with the ids of rows that are about to change, on the thread that changes them.
        removed: its model has it no more.
        held_as_stored: whether replicas hold the bits of a row as they are stored.
        removed_before: the version, or release, up to which another table of its name was there; 0 = none was.
    """

    removed = False
    held_as_stored = True

    def __init__(
        self, spec: TableSpec, memory: TableMemory = RAM, removed_before: int = 0, *, normed: bool | None = None
    ) -> None:
        """A table of zeros that has never changed.

        Args:
            spec: what the table is.
            memory: where its arrays are.
            removed_before: see the attribute.
            normed: whether it has a norm; None = as its spec says.

        Raises:
            StorageFailed: there is no room.
        """
        self.spec = spec
        self.removed_before = removed_before
        self._memory = memory
        self._normed = has_norm(spec) if normed is None else normed
        self.rows, self.stamps, self.digests = self._room_for(spec)
        self.counts, self.index = ChangeCounts.unchanged(spec.rows), ChangeIndex(self.stamps)
        self.checksum = 0
        self.before_change = list[Callable[[Ids], None]]()
        # The sum of the squares of all rows, and the largest there was; None = the table has no norm.
        self._square_sum = 0.0 if self._normed else None
        self._largest_sum = 0.0

    def _room_for(self, spec: TableSpec) -> tuple[Values, Stamps, RowDigests]:
        self._memory.check(table_bytes(spec), f"table {spec.name!r}")
        rows = self._memory.zeros((spec.rows, spec.dim), spec.dtype)
        return rows, self._memory.zeros((spec.rows,), np.int64), self._memory.zeros((spec.rows,), np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return table_bytes(self.spec)

    @property
    def norm(self) -> float:
        """The L2 norm of all rows together; 0 if the table has none."""
        return math.sqrt(max(0.0, self._square_sum or 0.0))

    # Changes.

    def apply(self, rows: RowBatch, number: int) -> None:
        """Overwrite rows, in the columns of their shard, and stamp them with `number`; or delete them.

        Deleting some columns of a row deletes the row once nothing but zeros is left of it.
        """
        for take in self.before_change:
            take(rows.ids)
        slots, start = self.locate(rows.ids), 0
        self.index.note(slots, number)
        for block in rows.blocks(BLOCK_ROWS):
            self._apply_block(block, slots[start : start + len(block)], number)
            start += len(block)
        if self._square_sum is not None and self._square_sum < self._largest_sum * _EXACT_SHARE:
            self._square_sum = self._sum_squares()

    def _apply_block(self, block: RowBatch, slots: Slots, number: int) -> None:
        # What needs memory comes before: a block that fails is tried again, and must not be half done.
        column, values = block.shard.col_offset, np.require(block.values, None, _FLAT)
        counts = self.counts.moved(self.stamps[slots], number)
        stamps, digests = self._stamps_of(block, slots, number), self._digests_of(block)
        words, first = words_of(values), first_word(column, self.spec.dtype)
        # Digests are sums over columns. Of some columns the kernel needs the weights, to take out the words that
        # it overwrites. Of whole rows it needs them only to make digests: what was there before does not matter.
        given_whole = _is_whole(block) and len(digests) == len(block)
        factors = _NO_WEIGHTS if given_whole else weights(first, words.shape[1])
        floats: NDArray[Any] = _NO_FLOATS
        row_floats, square_change = floats, 0.0
        if self._square_sum is not None and self.rows.itemsize > 2:
            floats, row_floats = self.rows, values
        elif self._square_sum is not None:  # Of fp16, which the kernel has no numbers of.
            before = self.rows[slots, column : column + values.shape[1]]
            square_change = sum_of_squares(values) - sum_of_squares(before)
        arrays = words_of(self.rows), self.stamps, self.digests, floats, first, column, slots, block.ids
        change, squares = row_kernels.write(*arrays, words, stamps, digests, row_floats, factors)
        self.counts = counts
        self.checksum = (self.checksum + int(change)) % 2**64
        if self._square_sum is not None:
            self._square_sum += squares + square_change
            self._largest_sum = max(self._largest_sum, self._square_sum)

    def _stamps_of(self, block: RowBatch, slots: Slots, number: int) -> Stamps:
        """The stamps that rows are to have: [n], or [1] for all."""
        if not block.deleted:
            return np.array([number])
        if _is_whole(block):
            return np.array([-number])
        # As long as other columns have anything, the row is still there.
        first, last = block.shard.col_offset, block.shard.col_offset + block.shard.cols
        words = words_of(self.rows)[slots]
        words[:, first_word(first, self.spec.dtype) : first_word(last, self.spec.dtype)] = 0
        return np.where(words.any(axis=1), number, -number)

    def _digests_of(self, block: RowBatch) -> RowDigests:
        """The digests [n] of a block's own columns; [0] if the kernel makes them while it writes the rows."""
        if block.deleted:
            return np.zeros(len(block), np.uint64)
        if block.digests is not None:
            return block.digests
        if _is_whole(block):
            return _NO_WEIGHTS if self.held_as_stored else self.held_digests(block.values)
        return row_digests(block.values, block.shard.col_offset)

    def restamp(self, ids: Ids, stamps: Stamps) -> None:
        """Give the rows `ids` ([n], strictly ascending) these stamps ([n]) instead of their own."""
        slots = self.locate(ids)
        self.index.note_each(slots, stamps)
        self.counts = self.counts.without(self.stamps[slots]).plus(stamps)
        self.stamps[slots] = stamps

    def grown(self, spec: TableSpec) -> Callable[[], None]:
        """Take the room for what the table is to be, which may have more rows. Blocks; any thread.

        Returns:
            A function that makes the table that, with zeros in new rows: for the thread that changes the table.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        arrays = self._room_for(spec) if spec.rows > self.spec.rows else None

        def grow() -> None:
            if spec.rows < self.spec.rows:
                raise ValueError(f"table {spec.name!r} has {self.spec.rows} rows and cannot shrink to {spec.rows}")
            if arrays is not None and spec.rows > self.spec.rows:
                self._move(arrays)
            self.spec = spec

        return grow

    def _move(self, arrays: tuple[Values, Stamps, RowDigests]) -> None:
        """Go on in longer arrays."""
        old, rows = (self.rows, self.stamps, self.digests), self.spec.rows

        def copy(share: slice) -> None:
            for new, before in zip(arrays, old, strict=True):
                new[share] = before[share]

        in_shares(copy, rows)
        counts = self.counts.plus_unchanged(len(arrays[0]) - rows)
        self.index.extend(arrays[1])
        self.rows, self.stamps, self.digests = arrays
        self.counts = counts

    # Loading.

    def load(self, ids: Ids, stamps: Stamps, digests: RowDigests, values: Values | None) -> None:
        """Set rows to what a checkpoint has of them. Any thread, and several at once for different rows.

        `index`, `counts`, `checksum` and `norm` are wrong until `recount`. Digests are taken as they are.

        Args:
            ids: [n], strictly ascending.
            stamps: [n], negative for deleted rows, otherwise positive.
            digests: [n]; of deleted rows they do not matter.
            values: [n, D]; None = the rows are deleted.

        Raises:
            InvalidInput: no such rows, stamps that cannot be, or lengths that do not fit; nothing was changed.
        """
        self._check_loaded(ids, stamps, digests, values)
        ids, stamps = np.require(ids, np.int64, _FLAT), np.require(stamps, np.int64, _FLAT)
        slots = self.locate(ids)
        if values is None:
            self.rows[slots] = 0
            self.stamps[slots] = stamps
            self.digests[slots] = 0
            return
        digests, words = np.require(digests, np.uint64, _FLAT), words_of(np.require(values, None, _FLAT))
        arrays = words_of(self.rows), self.stamps, self.digests, _NO_FLOATS
        row_kernels.write(*arrays, 0, 0, slots, ids, words, stamps, digests, _NO_FLOATS, _NO_WEIGHTS)

    def _check_loaded(self, ids: Ids, stamps: Stamps, digests: RowDigests, values: Values | None) -> None:
        name, rows = self.spec.name, len(ids)
        if not rows == len(stamps) == len(digests) or (
            values is not None and (values.shape, values.dtype) != ((rows, self.spec.dim), self.spec.dtype)
        ):
            raise InvalidInput(
                f"table {name!r}: ids, stamps, digests and values of a checkpoint do not fit together"
            )
        if not rows:
            return
        slots = self.locate(ids)
        if slots[0] < 0 or slots[-1] >= self.slots or np.any(ids[1:] <= ids[:-1]):
            raise InvalidInput(
                f"table {name!r}: row ids of a checkpoint must ascend within 0 to {self.slots - 1}, these go "
                f"from {ids[0]} to {ids[-1]}"
            )
        least, most = (-_IMPOSSIBLE, 0) if values is None else (0, _IMPOSSIBLE)
        wrong = np.flatnonzero((stamps <= least) | (stamps >= most))
        if len(wrong):
            raise InvalidInput(
                f"table {name!r}: row {ids[wrong[0]]} of a checkpoint has the stamp {stamps[wrong[0]]}, which no "
                f"{'deleted' if values is None else 'live'} row can have"
            )

    def recount(self) -> None:
        """Find index, counts, checksum and norm anew from the arrays."""
        self.counts, self.index = ChangeCounts.of(self.stamps), ChangeIndex(self.stamps)
        self.checksum = 0
        for start in range(0, self.slots, _SCAN_ROWS):
            slots = np.arange(start, min(self.slots, start + _SCAN_ROWS))
            self.checksum += int(
                digest_kernels.checksum(self.ids_of(slots), self.digests[slots[0] : slots[-1] + 1])
            )
        self.checksum %= 2**64
        self._square_sum = self._sum_squares() if self._normed else None

    def _sum_squares(self) -> float:
        sums = [0.0]

        def add(share: slice) -> None:
            for start in range(share.start, share.stop, BLOCK_ROWS):
                sums.append(sum_of_squares(self.rows[start : min(share.stop, start + BLOCK_ROWS)]))

        in_shares(add, self.slots)
        self._largest_sum = math.fsum(sums)
        return self._largest_sum

    # Addresses. Only these methods know that ids are the numbers from 0 on.

    @property
    def slots(self) -> int:
        """How many slots its arrays have: rows, whether they ever changed or not."""
        return len(self.stamps)

    def locate(self, ids: Ids) -> Slots:
        """The slots of the rows `ids` ([n], strictly ascending) in the arrays: [n], strictly ascending."""
        return ids

    def ids_of(self, slots: Slots) -> Ids:
        """The ids of the rows in `slots` ([n], strictly ascending): [n], strictly ascending."""
        return slots

    # Questions.

    def numbers(self, ids: Ids) -> Stamps:
        """When the rows `ids` ([n]) last changed, or were deleted: [n], 0 = never."""
        numbers: Stamps = np.abs(self.stamps[self.locate(ids)])
        return numbers

    def deleted(self, ids: Ids) -> Mask:
        """Which of the rows `ids` ([n]) were deleted, and have not come back: [n]."""
        mask: Mask = self.stamps[self.locate(ids)] < 0
        return mask

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, deleted ones among them."""
        return self.ids_of(self.index.changed_since(number))

    def changed_in(self, first: int, last: int, number: int) -> Slots:
        """Ascending slots ([n] int64) from `first` to before `last` of rows that are stamped after `number`,
        deleted ones among them. It reads the stamps of those blocks only that changed after the number.
        """
        return self.index.changed_in(first, last, number)

    def not_stamped(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows that are there and have another stamp than `number`."""
        blocks = ((start, self.stamps[start : start + _SCAN_ROWS]) for start in range(0, self.slots, _SCAN_ROWS))
        return self.ids_of(
            np.concatenate([np.flatnonzero((stamps > 0) & (stamps != number)) + start for start, stamps in blocks])
        )

    # Rows.

    def rows_of(self, ids: Ids) -> Values:
        """The current rows `ids` ([n], strictly ascending): a view where they leave no gap, otherwise a copy."""
        slots = self.locate(ids)
        run = contiguous(slots)
        return self.rows[run] if run is not None else np.take(self.rows, slots, axis=0)

    def held_digests(self, rows: Values) -> RowDigests:
        """The digests [n] of what replicas hold that have applied `rows` ([n, D], as stored)."""
        return row_digests(rows)

    def fits(self, ids: Ids, rows: Values) -> Mask:
        """Which of `rows` ([n, D]), read as the rows `ids` ([n]), have the digest that is kept of them: [n]."""
        mask: Mask = self.held_digests(rows) == self.digests[self.locate(ids)]
        return mask

    def read(self, ids: Ids, out: Values) -> RowBatch:
        """Copy the rows `ids` ([n], strictly ascending) into `out` ([n, D]), and check their digests meanwhile.

        Returns:
            The rows, with `out` as their values, and with their digests if replicas hold rows as they are stored.

        Raises:
            DamagedRows: some do not fit their digests.
        """
        if not self.held_as_stored:
            np.take(self.rows, self.locate(ids), axis=0, out=out, mode="clip")
            self.check(ids, out)
            return RowBatch.of_table(self.spec, ids, out)
        rows, digests = words_of(self.rows), np.empty(len(ids), np.uint64)
        factors = weights(0, rows.shape[1])
        if row_kernels.gather_checked(rows, self.digests, self.locate(ids), factors, words_of(out), digests):
            self.check(ids, out)
        return RowBatch(Shard.whole(self.spec), ids, out, digests=digests)

    def check(self, ids: Ids, rows: Values) -> None:
        """Check `rows` ([n, D]), read as the rows `ids` ([n]).

        Raises:
            DamagedRows: some do not fit their digests.
        """
        blocks = (slice(start, start + BLOCK_ROWS) for start in range(0, len(ids), BLOCK_ROWS))
        wrong = np.concatenate([ids[:0], *(ids[each][~self.fits(ids[each], rows[each])] for each in blocks)])
        if len(wrong):
            raise DamagedRows(self.spec.name, wrong)


def _is_whole(rows: RowBatch) -> bool:
    """Whether rows have all columns of their table."""
    return rows.shard.cols == rows.table.dim
