"""Rows with a stamp on every row: the one idea every hop is built on.

"What does X still lack?" is `rows whose stamp > X's version`, always answered with sorted unique ids
and their current values. Of a row that was deleted, the stamp is the negative of the number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.core.change_counts import ChangeCounts, Stamps
from deltasync.core.change_index import ChangeIndex
from deltasync.core.damage import DamagedRows
from deltasync.core.digests import (
    RowDigests,
    Squares,
    first_word,
    row_digests,
    squared_norms,
    weights,
    words_of,
)
from deltasync.core.id_sets import contiguous
from deltasync.core.rows import BLOCK_ROWS, Ids, Mask, RowBatch, Values
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.tags import IMPOSSIBLE, Tags, countable, may_be_deleted, tag_key, tags_of, wrong_tags
from deltasync.kernels import digests as digest_kernels
from deltasync.kernels import rows as kernels

# Stamps are scanned in blocks so that a scan's scratch memory stays in the processor's cache.
_SCAN_ROWS = 1 << 20
# Once a sum has shrunk to this share of what it was, rounding has eaten the rest of it.
_EXACT_SHARE = 2.0**-30

# The arrays of a table, as bits.
ROWS, STAMPS, TAGS, DIGESTS, SQUARES = 1, 2, 4, 8, 16
_ALL_ARRAYS = ROWS | STAMPS | TAGS | DIGESTS | SQUARES

T = TypeVar("T", bound=np.generic)


def _some(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + BLOCK_ROWS] for start in range(0, len(ids), BLOCK_ROWS))


def has_norm(spec: TableSpec) -> bool:
    """Whether a table has a norm."""
    return spec.kind.trained and spec.dtype.kind == "f"


class StampedTable:
    """The rows of one table, the version at which each last changed, and the digest of each.

    Digests are kept by segments of columns, one for each column-wise shard that rows have come in: of what a shard
    overwrites nothing needs to be read.

    Attributes:
        spec: what the table is.
        rows: [N, D] values, in the table's dtype.
        stamps: [N] int64, 0 = never changed, negative = deleted then. Written by this class only.
        tags: [N] uint16: that stamps and digests are those that were stored, see `core.tags`.
        digests: [N, segments] uint64: of the rows, as they were given or are held.
        squares: [N, segments] fp32: squared norms; [0, segments] where the table has no norm.
        columns: where segments begin, and the last one ends.
        counts: of the stamps; any thread may read them.
        index: finds the rows that are stamped after a number.
        checksum: of all rows; see `core.digests`.
        restamped: ids of rows whose stamps were not those that were stored, until who tells of them takes them.
        removed: its model has it no more.
        removed_before: the version, or release, up to which another table of its name was there; 0 = none was.
    """

    # What rows are to whoever keeps them: those of one table are not taken for those of another, see `core.tags`.
    role = "rows"

    removed, removed_before = False, 0

    def __init__(
        self,
        spec: TableSpec,
        rows: Values,
        stamps: Stamps,
        digests: RowDigests,
        squares: Squares,
        columns: Sequence[int] = (),
        tags: Tags | None = None,
    ) -> None:
        """Where there are no `tags`, they are made of what there is."""
        self.spec = spec
        self.rows = rows
        self.stamps = stamps
        self._key = tag_key(self.role, spec)
        self.restamped: list[Ids] = []
        if not -IMPOSSIBLE < stamps.min(initial=0) <= stamps.max(initial=0) < IMPOSSIBLE:
            wrong = (stamps <= -IMPOSSIBLE) | (stamps >= IMPOSSIBLE)
            stamps[wrong] = countable(stamps[wrong])  # Their tags show it, see `retag`.
        self.digests = digests
        self.squares = squares
        self.columns = tuple(columns) or (0, spec.dim)
        self.tags = np.zeros(spec.rows, np.uint16) if tags is None else tags
        if tags is None:
            self.make_tags()
        self._count_stamps()
        self.count()

    @classmethod
    def zeros(cls, spec: TableSpec) -> "StampedTable":
        """A table in memory that has never changed."""
        rows, stamps = np.zeros((spec.rows, spec.dim), spec.dtype), np.zeros(spec.rows, np.int64)
        squares = np.zeros((spec.rows if has_norm(spec) else 0, 1), np.float32)
        return cls(spec, rows, stamps, np.zeros((spec.rows, 1), np.uint64), squares)

    def count(self) -> None:
        """Find checksum and norm anew from what is kept of each row."""
        self.checksum = int(digest_kernels.checksum_of_all(self.digests))
        self._square_sum = self._largest_sum = float(self.squares.sum(dtype=np.float64))

    def _count_stamps(self) -> None:
        self.counts, self.index = ChangeCounts.of(self.stamps), ChangeIndex(self.stamps)

    def apply(self, rows: RowBatch, number: int) -> None:
        """Overwrite some rows, in the columns of their shard, and stamp them with `number`; or delete them."""
        self.split(rows.shard.col_offset, rows.shard.col_offset + rows.shard.cols)
        self.index.note(rows.ids, number)
        for block in rows.blocks(BLOCK_ROWS):
            self._apply_block(block, number)
        if self._square_sum < self._largest_sum * _EXACT_SHARE:
            self.count()

    def _apply_block(self, block: RowBatch, number: int) -> None:
        # What needs memory comes before: a block that fails is tried again, and must not be half done.
        counts = self.counts.moved(self.stamps[block.ids], number)
        change, square_change = self._clear(block, number) if block.deleted else self._write(block, number)
        self.wrote(block.ids, _ALL_ARRAYS)
        self.counts = counts
        self.checksum = (self.checksum + int(change)) % 2**64
        self._square_sum += square_change
        self._largest_sum = max(self._largest_sum, self._square_sum)

    def _write(self, block: RowBatch, number: int) -> tuple[np.uint64, float]:
        segments, first = self._segments(block.shard), block.shard.col_offset
        digests, squares = self._digests_of(block, segments), self._squares_of(block, segments)
        words, column = words_of(block.values), first_word(first, self.spec.dtype)
        return kernels.write(*self._arrays, column, segments.start, block.ids, words, digests, squares, number)

    def _clear(self, block: RowBatch, number: int) -> tuple[np.uint64, float]:
        shard, segments = block.shard, self._segments(block.shard)
        first, last = (
            first_word(each, self.spec.dtype) for each in (shard.col_offset, shard.col_offset + shard.cols)
        )
        return kernels.clear(*self._arrays, first, last, segments.start, segments.stop, block.ids, number)

    @property
    def _arrays(self) -> tuple[NDArray[Any], Stamps, Tags, int, RowDigests, Squares]:
        return words_of(self.rows), self.stamps, self.tags, self._key, self.digests, self.squares

    def _digests_of(self, block: RowBatch, segments: range) -> RowDigests:
        """The digests [n, k] of rows by segment."""
        if len(segments) == 1 and block.digests is not None:
            return block.digests[:, None]
        if len(segments) == 1 == len(self.columns) - 1:
            return self.held_digests(block.values)[:, None]
        return self._by_segment(block, segments, row_digests)

    def _squares_of(self, block: RowBatch, segments: range) -> Squares:
        """The squared norms [n, k] of rows by segment; [0, k] where they are not kept."""
        if not len(self.squares):
            return np.empty((0, len(segments)), np.float32)
        return self._by_segment(block, segments, lambda values, _: squared_norms(values))

    def _by_segment(self, block: RowBatch, segments: range, of: Callable[[Values, int], NDArray[T]]) -> NDArray[T]:
        first, columns = block.shard.col_offset, self.columns
        parts = [of(block.values[:, columns[s] - first : columns[s + 1] - first], columns[s]) for s in segments]
        return parts[0][:, None] if len(parts) == 1 else np.stack(parts, axis=1)

    def _segments(self, shard: Shard) -> range:
        """The segments that a shard's columns are."""
        edges = shard.col_offset, shard.col_offset + shard.cols
        return range(*(self.columns.index(edge) for edge in edges))

    def split(self, *edges: int) -> None:
        """Let segments end at these columns, too. That takes as long as to read all rows, where they did not.

        What did not fit its digest does not fit those of its segments.
        """
        columns = tuple(sorted({*self.columns, *edges}))
        if columns == self.columns:
            return
        before = self.digests, self.squares, self.columns
        self.digests, self.squares, self.columns = *self._room_of(columns), columns
        try:
            for block in self._blocks():
                self._digest(block)
                self.digests[block, 0] += before[0][block].sum(axis=1) - self.digests[block].sum(axis=1)
        except BaseException:  # It is tried again, and must not look done.
            self.digests, self.squares, self.columns = before
            raise
        self.wrote(None, DIGESTS | SQUARES)
        self.count()

    def make_digests(self) -> None:
        """Make the digests of all rows anew, of what is there. Tags stay: they show what has changed meanwhile."""
        for block in self._blocks():
            self._digest(block)
        self.wrote(None, DIGESTS | SQUARES)
        self.count()

    def make_tags(self) -> None:
        """Make the tags of all rows anew, of what is there."""
        for block in self._blocks():
            ids = np.arange(block.start, min(block.stop, self.spec.rows))
            self.tags[block] = tags_of(self._key, ids, self.stamps[block], self.digests[block])
        self.wrote(None, TAGS)

    def trust(self, ids: Ids) -> None:
        """Make the digests of some rows ([n], strictly ascending) anew where they do not fit, of what is there.

        `count` is to be called once all digests are right.
        """
        for start in range(0, len(ids), BLOCK_ROWS):
            damaged = self.damaged(ids[start : start + BLOCK_ROWS])
            self._digest(damaged)
            self._tag(damaged)
            self.wrote(damaged, DIGESTS | SQUARES)

    def square(self, ids: Ids) -> None:
        """Make the squared norms of rows that fit their digests ([n], strictly ascending) anew; as for `trust`."""
        self._digest(ids)
        self.wrote(ids, DIGESTS | SQUARES)

    def _digest(self, where: slice | Ids) -> None:
        values = self.rows[where]
        rows = RowBatch.of_table(self.spec, np.arange(len(values)), values)  # Of which the ids do not matter.
        segments = self._segments(rows.shard)
        self.digests[where] = self._digests_of(rows, segments)
        if len(self.squares):
            self.squares[where] = self._squares_of(rows, segments)

    def _blocks(self) -> Iterator[slice]:
        return (slice(start, start + BLOCK_ROWS) for start in range(0, self.spec.rows, BLOCK_ROWS))

    def held_digests(self, rows: Values) -> RowDigests:
        """The digests [n] of what replicas hold that have applied `rows` ([n, D], as stored)."""
        return row_digests(rows)

    def _room_of(self, columns: tuple[int, ...]) -> tuple[RowDigests, Squares]:
        """Room for digests and squares of so many segments."""
        segments = len(columns) - 1
        return np.zeros((self.spec.rows, segments), np.uint64), np.zeros((len(self.squares), segments), np.float32)

    def restamp(self, ids: Ids, stamps: Stamps) -> None:
        """Give the rows `ids` ([n], strictly ascending) these stamps ([n]) instead of their own."""
        self.index.note_each(ids, stamps)
        self.counts = self.counts.without(self.stamps[ids]).plus(stamps)
        self.stamps[ids] = stamps
        self._tag(ids)
        self.wrote(ids, STAMPS)

    def _tag(self, ids: Ids) -> None:
        self.tags[ids] = tags_of(self._key, ids, self.stamps[ids], self.digests[ids])
        self.wrote(ids, TAGS)

    def forget_after(self, number: int) -> None:
        """Take stamps above `number`, which is the newest there was, for damaged: these rows are sent again."""
        if self.counts.newest > number:
            later = np.flatnonzero(np.abs(self.stamps) > number)
            self.stamps[later] = np.clip(self.stamps[later], -number, number)
            self._tag(later)
            self.wrote(later, STAMPS)
            self._count_stamps()

    def untagged(self, first: int = 0, last: int | None = None) -> Ids:
        """Those of the rows from `first` to before `last`, or to the end, that do not fit their tags."""
        last = self.spec.rows if last is None else last
        starts = range(first, last, _SCAN_ROWS)
        blocks = (slice(start, min(last, start + _SCAN_ROWS)) for start in starts)
        found = [
            wrong_tags(self._key, each.start, self.stamps[each], self.digests[each], self.tags[each])
            for each in blocks
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def retag(self, ids: Ids, number: int) -> None:
        """Find out what is wrong with rows `ids` ([n], strictly ascending) that do not fit their tags, while
        `number` is the newest.

        A row that would fit with another digest has that. Of others nobody knows when they last changed: they are
        taken for changed with `number`, and are `restamped`. The checksum stays: it does not have what was damaged
        after it was counted.
        """
        if not len(ids):
            return
        held = np.concatenate([self.held_digests(self.rows[each]) for each in _some(ids)])
        stamps, kept = self.stamps[ids], self.digests[ids].sum(axis=1)
        sound = (held != kept) & (tags_of(self._key, ids, stamps, held[:, None]) == self.tags[ids])
        self._digest(ids[sound])
        rows_of_zeros = (held == 0) & (kept == 0)
        gone = rows_of_zeros & may_be_deleted(self._key, ids, stamps, kept[:, None], self.tags[ids], number)
        unknown = ids[~sound]
        self.stamps[unknown] = np.where(gone, -number, number)[~sound]
        self._tag(unknown)
        self.wrote(ids, STAMPS | DIGESTS | SQUARES)
        self._count_stamps()
        self.restamped += [unknown] if len(unknown) else []

    def retag_all(self, number: int) -> None:
        """The same for all rows, of which what is kept was just read from files, and counted."""
        if len(wrong := self.untagged()):
            self.retag(wrong, number)
            self.count()

    def retag_among(self, ids: Ids) -> bool:
        """The same for those of the rows `ids` that do not fit their tags; whether there were any."""
        wrong = ids[tags_of(self._key, ids, self.stamps[ids], self.digests[ids]) != self.tags[ids]]
        self.retag(wrong, self.counts.newest)
        return len(wrong) > 0

    def numbers(self, ids: Ids) -> Stamps:
        """When the rows `ids` ([n]) last changed, or were deleted: [n], 0 = never."""
        numbers: Stamps = np.abs(self.stamps[ids])
        return numbers

    def deleted(self, ids: Ids) -> Mask:
        """Which of the rows `ids` ([n]) were deleted, and have not come back: [n]."""
        mask: Mask = self.stamps[ids] < 0
        return mask

    @property
    def norm(self) -> float:
        """The L2 norm of all rows together; 0 for what has none."""
        return math.sqrt(max(0.0, self._square_sum))

    def fits(self, ids: Ids, rows: Values) -> Mask:
        """Which of `rows` ([n, D]), read as the rows `ids` ([n]), have the digest that is kept of them: [n]."""
        mask: Mask = self.held_digests(rows) == self.digests[ids].sum(axis=1)
        return mask

    def rows_of(self, ids: Ids) -> Values:
        """The current rows `ids` ([n], strictly ascending): a view where they leave no gap, otherwise a copy."""
        run = contiguous(ids)
        return self.rows[run] if run is not None else np.take(self.rows, ids, axis=0)

    def changed_since(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows stamped after `number`, deleted ones among them."""
        return self.index.changed_since(number)

    def not_stamped(self, number: int) -> Ids:
        """Sorted unique ids ([n] int64) of the rows that are there, and have another stamp than `number`; and of
        those deleted then: after a crash, of a delete no more than the stamp may be there.
        """
        starts = range(0, len(self.stamps), _SCAN_ROWS)
        blocks = ((start, self.stamps[start : start + _SCAN_ROWS]) for start in starts)
        return np.concatenate(
            [
                np.flatnonzero((stamps > 0) & (stamps != number) | (stamps == -number)) + start
                for start, stamps in blocks
            ]
        )

    def read(self, ids: Ids, out: Values) -> RowBatch:
        """The rows `ids` ([n], strictly ascending) as they are now, their values copied into `out` ([n, D]), with
        their digests.

        Raises:
            DamagedRows: some do not fit their digests.
        """
        rows, copies, digests = words_of(self.rows), words_of(out), np.empty(len(ids), np.uint64)
        factors = weights(0, rows.shape[1])
        if kernels.gather_checked(rows, self.digests, ids, factors, copies, digests):
            self.check(ids, out)
        return RowBatch(Shard.whole(self.spec), ids, out, digests=digests)

    def check(self, ids: Ids, rows: Values) -> None:
        """Check `rows` ([n, D]), read as the rows `ids` ([n]).

        Raises:
            DamagedRows: some do not fit their digests.
        """
        if len(wrong := self._unfit(ids, rows)):
            raise DamagedRows(self, self.spec.name, wrong)

    def damaged(self, ids: Ids) -> Ids:
        """Those of the rows `ids` ([n], strictly ascending) that do not fit their digests."""
        return self._unfit(ids, self.rows_of(ids))

    def _unfit(self, ids: Ids, rows: Values) -> Ids:
        blocks = (slice(start, start + BLOCK_ROWS) for start in range(0, len(ids), BLOCK_ROWS))
        return np.concatenate([ids[:0], *(ids[block][~self.fits(ids[block], rows[block])] for block in blocks)])

    def mend(self, rows: RowBatch) -> None:
        """Write rows again as they were stored: neither stamps nor digests change."""
        first = first_word(rows.shard.col_offset, self.spec.dtype)
        kernels.scatter(words_of(self.rows), first, rows.ids, words_of(rows.values))
        self.wrote(rows.ids, ROWS)

    def wrote(self, ids: Ids | None, arrays: int) -> None:
        """Called after rows of some arrays were written, `ids` ([n]) or else all: for tables that are in files."""
