"""Tables with a stamp on every row, the idea on which everything is built.

"What does X still lack?" is the rows with a stamp above X's version, always answered with sorted unique ids and
their current values. A deleted row has the negative of the number as its stamp.
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

# Stamps are scanned in blocks whose scratch memory fits the processor's cache.
_SCAN_ROWS = 1 << 20
# Once a sum has shrunk to this share of its largest value, rounding errors dominate it.
_EXACT_SHARE = 2.0**-30
# No stamp reaches this number, so that sums and differences of two stamps do not overflow.
_IMPOSSIBLE = 1 << 62
# Bytes of each row besides its values: stamp and digest.
_ROW_BYTES = 16
_FLAT: list[Literal["C"]] = ["C"]  # The layout for kernels. Arrays may begin at any byte.
_NO_WEIGHTS, _NO_FLOATS = np.zeros(0, np.uint64), np.zeros((0, 0), np.float32)


def has_norm(spec: TableSpec) -> bool:
    """Whether a table has a norm."""
    return spec.kind.trained and spec.dtype.kind == "f"


def table_bytes(spec: TableSpec) -> int:
    """Size of the arrays of a table in bytes."""
    return spec.rows * (spec.dim * spec.dtype.itemsize + _ROW_BYTES)


class StampedTable:
    """The rows of one table, with the version at which each last changed, and the digest of each.

    Used on the thread that changes it, except for `spec`, `counts` and where stated otherwise.

    Attributes:
        rows: [N, D] values in the table's dtype, by slot.
        stamps: [N] int64, by slot; 0 = never changed, negative = deleted at that number.
        digests: [N] uint64, by slot, of the rows as they arrived, or as replicas hold them.
        counts: counts of the stamps; any thread may read them.
        index: finds the slots of rows that are stamped after a number.
        checksum: checksum of all rows; see `core.digests`.
        before_change: called with the ids of rows that are about to change, on the thread that changes them.
        removed: whether its model has removed it.
        unfinished: the number of which more rows may follow later; 0 if all rows of each number are stamped.
        held_as_stored: whether replicas hold the bits of a row as stored.
        removed_before: the version or release up to which an earlier table of its name existed; 0 = none did.
    """

    removed = False
    unfinished = 0
    held_as_stored = True

    def __init__(
        self, spec: TableSpec, memory: TableMemory = RAM, removed_before: int = 0, *, normed: bool | None = None
    ) -> None:
        """Make a table of zeros that has never changed. Without `normed`, its spec says whether it has a norm."""
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
        """Size of its arrays in bytes."""
        return table_bytes(self.spec)

    @property
    def norm(self) -> float:
        """The L2 norm of all rows together; 0 if the table has none."""
        return math.sqrt(max(0.0, self._square_sum or 0.0))

    # Changes.

    def apply(self, rows: RowBatch, number: int) -> int:
        """Overwrite rows, in the columns of their shard, and stamp them with `number`; or delete them.

        Deleting some columns of a row deletes the row once all its columns are zero. Returns the number of rows
        that do not match their digests; always 0 if replicas hold other bits than stored.
        """
        for take in self.before_change:
            take(rows.ids)
        slots, start, wrong = self.locate(rows.ids), 0, 0
        self.index.note(slots, number)
        for block in rows.blocks(BLOCK_ROWS):
            wrong += self._apply_block(block, slots[start : start + len(block)], number)
            start += len(block)
        if self._square_sum is not None and self._square_sum < self._largest_sum * _EXACT_SHARE:
            self._square_sum = self._sum_squares()
        return wrong

    def _apply_block(self, block: RowBatch, slots: Slots, number: int) -> int:
        # Allocate memory first, because a block that fails is retried and must not be half done.
        column, values = block.shard.col_offset, np.require(block.values, None, _FLAT)
        counts = self.counts.moved(self.stamps[slots], number)
        stamps, digests = self._stamps_of(block, slots, number), self._digests_of(block)
        words, first = words_of(values), first_word(column, self.spec.dtype)
        # Digests of bits that only replicas hold cannot be checked here.
        unchecked = not self.held_as_stored and _is_whole(block)
        factors = _NO_WEIGHTS if unchecked else weights(first, words.shape[1])
        floats: NDArray[Any] = _NO_FLOATS
        row_floats, square_change = floats, 0.0
        if self._square_sum is not None and self.rows.itemsize > 2:
            floats, row_floats = self.rows, values
        elif self._square_sum is not None:  # The kernel cannot read fp16.
            before = self.rows[slots, column : column + values.shape[1]]
            square_change = sum_of_squares(values) - sum_of_squares(before)
        arrays = words_of(self.rows), self.stamps, self.digests, floats, first, column, slots, block.ids
        change, squares, wrong = row_kernels.write(*arrays, words, stamps, digests, row_floats, factors)
        self.counts = counts
        self.checksum = (self.checksum + int(change)) % 2**64
        if self._square_sum is not None:
            self._square_sum += squares + square_change
            self._largest_sum = max(self._largest_sum, self._square_sum)
        return int(wrong)

    def _stamps_of(self, block: RowBatch, slots: Slots, number: int) -> Stamps:
        """The new stamps of rows: [n], or [1] for all."""
        if not block.deleted:
            return np.array([number])
        if _is_whole(block):
            return np.array([-number])
        # The row still exists while other columns are not zero.
        first, last = block.shard.col_offset, block.shard.col_offset + block.shard.cols
        words = words_of(self.rows)[slots]
        words[:, first_word(first, self.spec.dtype) : first_word(last, self.spec.dtype)] = 0
        return np.where(words.any(axis=1), number, -number)

    def _digests_of(self, block: RowBatch) -> RowDigests:
        """The digests [n] of a block's columns; [0] if the kernel makes them while it writes the rows."""
        if block.deleted:
            return np.zeros(len(block), np.uint64)
        if block.digests is not None:
            return block.digests
        if _is_whole(block):
            return _NO_WEIGHTS if self.held_as_stored else self.held_digests(block.values)
        return row_digests(block.values, block.shard.col_offset)

    def restamp(self, ids: Ids, stamps: Stamps) -> None:
        """Replace the stamps of the rows `ids` ([n], strictly ascending)."""
        slots = self.locate(ids)
        self.index.note_each(slots, stamps)
        self.counts = self.counts.without(self.stamps[slots]).plus(stamps)
        self.stamps[slots] = stamps

    def grown(self, spec: TableSpec) -> Callable[[], None]:
        """Allocate room for the table as in `spec`, perhaps with more rows. Blocks; any thread may call it.

        Returns a function that enlarges the table with rows of zeros, for the thread that changes it.
        """
        arrays = self._room_for(spec) if spec.rows > self.spec.rows else None

        def grow() -> None:
            if spec.rows < self.spec.rows:
                raise ValueError(f"table {spec.name!r} has {self.spec.rows} rows and cannot shrink to {spec.rows}")
            if arrays is not None and spec.rows > self.spec.rows:
                in_shares(copy, self.spec.rows)
                counts = self.counts.plus_unchanged(spec.rows - self.spec.rows)
                self.rows, self.stamps, self.digests = arrays
                self.index.extend(self.stamps)
                self.counts = counts
            self.spec = spec

        def copy(share: slice) -> None:
            for new, before in zip(arrays or (), (self.rows, self.stamps, self.digests), strict=True):
                new[share] = before[share]

        return grow

    # Loading.

    def load(self, ids: Ids, stamps: Stamps, digests: RowDigests, values: Values | None) -> None:
        """Set rows from a checkpoint. Several threads may call it at once for different rows.

        `ids` ascend strictly. `stamps` are negative for deleted rows, which have no `values` and no digests.
        `index`, `counts`, `checksum` and `norm` are wrong until `recount`. Digests are not checked.
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
                f"table {name!r}: row {ids[wrong[0]]} of a checkpoint has the stamp {stamps[wrong[0]]}, which is "
                f"impossible for a {'deleted' if values is None else 'live'} row"
            )

    def recount(self) -> None:
        """Compute index, counts, checksum and norm from the arrays."""
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

    # Addresses. Only these methods know that ids are the numbers from 0.

    @property
    def slots(self) -> int:
        """Number of slots: rows, whether they ever changed or not."""
        return len(self.stamps)

    def locate(self, ids: Ids) -> Slots:
        """The slots of the rows `ids` ([n], strictly ascending) in the arrays: [n], strictly ascending."""
        return ids

    def ids_of(self, slots: Slots) -> Ids:
        """The ids of the rows in `slots` ([n], strictly ascending): [n], strictly ascending."""
        return slots

    # Questions.

    def numbers(self, ids: Ids) -> Stamps:
        """When the rows `ids` ([n]) last changed or were deleted: [n], 0 = never."""
        numbers: Stamps = np.abs(self.stamps[self.locate(ids)])
        return numbers

    def deleted(self, ids: Ids) -> Mask:
        """Whether each of the rows `ids` ([n]) is deleted: [n]."""
        mask: Mask = self.stamps[self.locate(ids)] < 0
        return mask

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, including deleted ones."""
        return self.ids_of(self.index.changed_since(number))

    def not_stamped(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the live rows with another stamp than `number`."""
        blocks = ((start, self.stamps[start : start + _SCAN_ROWS]) for start in range(0, self.slots, _SCAN_ROWS))
        return self.ids_of(
            np.concatenate([np.flatnonzero((stamps > 0) & (stamps != number)) + start for start, stamps in blocks])
        )

    # Rows.

    def rows_of(self, ids: Ids) -> Values:
        """The current rows `ids` ([n], strictly ascending), as a view if they have no gaps, otherwise a copy."""
        slots = self.locate(ids)
        run = contiguous(slots)
        return self.rows[run] if run is not None else np.take(self.rows, slots, axis=0)

    def held_digests(self, rows: Values) -> RowDigests:
        """The digests [n] of the rows that replicas hold after applying `rows` ([n, D], as stored)."""
        return row_digests(rows)

    def fits(self, ids: Ids, rows: Values) -> Mask:
        """Whether each of `rows` ([n, D]), read as the rows `ids` ([n]), matches its stored digest: [n]."""
        mask: Mask = self.held_digests(rows) == self.digests[self.locate(ids)]
        return mask

    def read(self, ids: Ids, out: Values) -> RowBatch:
        """Copy the rows `ids` ([n], strictly ascending) into `out` ([n, D]), and check their digests.

        Returns them with `out` as values, and with digests if replicas hold rows as stored.
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
        """Check `rows` ([n, D]), read as the rows `ids` ([n])."""
        blocks = (slice(start, start + BLOCK_ROWS) for start in range(0, len(ids), BLOCK_ROWS))
        wrong = np.concatenate([ids[:0], *(ids[each][~self.fits(ids[each], rows[each])] for each in blocks)])
        if len(wrong):
            raise DamagedRows(self.spec.name, wrong)


def _is_whole(rows: RowBatch) -> bool:
    """Whether rows have all columns of their table."""
    return rows.shard.cols == rows.table.dim
