"""The row batch: the one type in which rows move, and the rules that every sender of some has to keep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltasync.base.errors import Damaged, InvalidInput
from deltasync.base.words import counted
from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard, TableSpec
from deltasync.kernels import dirty_rows

# Rows are taken in blocks whose scratch memory fits the processor's cache.
BLOCK_ROWS = 4096

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.generic]
Norms: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]


def row_ids(table: TableSpec, ids: ArrayLike) -> Ids:
    """Row ids ([n], of any integer type) of a table as int64.

    Raises:
        InvalidInput: they are of another type or shape, or larger than any int64.
    """
    found = np.asarray(ids)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        text = f"ids of type {found.dtype} and shape {list(found.shape)}, expected integers [n]"
        raise InvalidInput(f"table {table.name!r}: {text}")
    if found.dtype == np.uint64 and len(found) and found.max() > np.iinfo(np.int64).max:
        raise InvalidInput(f"table {table.name!r}: id {found.max()}, expected at most {np.iinfo(np.int64).max}")
    return found.astype(ID_TYPE, copy=False)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some rows of a shard, from the trainer's tracker to a replica's target, on the wire and in the log.

    Its arrays may be read-only views of a message or of a record.

    Attributes:
        shard: the shard; all of a table, where rows are not published but released.
        ids: [n] int64, global row ids, strictly ascending.
        values: [n, columns of the shard], of the table's type; [n, 0] where a consumer's mode is `ids`.
        norms: [n] fp32, L2 norms of what has changed in the rows; None where nobody has asked for them.
        digests: [n] uint64, the digests of the rows, see `core.digests`; None where they were not made. Of the
            shard's columns, or, of rows that are encoded, of these as replicas hold them.
        deleted: the rows are no more. Their values are zeros, as of rows that never were, and are not sent.
        encoded: the `Rows` message that has just these rows, of which the arrays are views: it goes to the log and
            to replicas as it came. None where there is none yet.
    """

    shard: Shard
    ids: Ids
    values: Values
    norms: Norms | None = None
    deleted: bool = False
    digests: RowDigests | None = None
    encoded: memoryview | None = None

    @classmethod
    def deletes(cls, shard: Shard, ids: ArrayLike) -> "RowBatch":
        """Rows of a shard that are no more. Their zeros take no memory.

        Raises:
            InvalidInput: the ids are no integers, see `row_ids`.
        """
        ids = row_ids(shard.table, ids)
        zeros = np.broadcast_to(np.zeros((), shard.table.dtype), (len(ids), shard.cols))
        return cls(shard, ids, zeros, deleted=True)

    @classmethod
    def of_table(cls, table: TableSpec, ids: ArrayLike, values: Values, norms: Norms | None = None) -> "RowBatch":
        """Whole rows of a table.

        Raises:
            InvalidInput: the ids are no integers, see `row_ids`.
        """
        return cls(Shard.whole(table), row_ids(table, ids), values, norms)

    @property
    def table(self) -> TableSpec:
        """The table."""
        return self.shard.table

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, as they are sent."""
        return self.ids.nbytes + (0 if self.deleted else self.values.nbytes)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "RowBatch":
        """Some of the rows, as views."""
        norms = None if self.norms is None else self.norms[rows]
        digests = None if self.digests is None else self.digests[rows]
        return RowBatch(self.shard, self.ids[rows], self.values[rows], norms, self.deleted, digests)

    def among(self, ids: ArrayLike) -> "RowBatch":
        """Those of the rows that are among these [n], without norms and digests."""
        where = np.flatnonzero(np.isin(self.ids, ids))
        return RowBatch(self.shard, self.ids[where], self.values[where], deleted=self.deleted)

    def with_values(self, table: TableSpec, values: Values, norms: Norms | None = None) -> "RowBatch":
        """The same rows of a whole table in another form: encoded, or decoded."""
        return replace(self, shard=Shard.whole(table), values=values, norms=norms, digests=None, encoded=None)

    def digested(self) -> "RowBatch":
        """The same rows, with their digests; those of deleted rows are 0, and not made."""
        if self.deleted or self.digests is not None:
            return self
        return replace(self, digests=row_digests(self.values, self.shard.col_offset), encoded=None)

    def blocks(self, rows: int) -> Iterator["RowBatch"]:
        """All rows in order, so many at a time, as views."""
        if 0 < len(self.ids) <= rows:
            return iter((self,))
        return (self[start : start + rows] for start in range(0, len(self), rows))

    @classmethod
    def from_bytes(
        cls,
        shards: Sequence[Shard],
        slot: int,
        raw_ids: bytes | memoryview,
        raw_values: bytes | memoryview,
        *,
        deleted: bool = False,
        raw_digests: bytes | memoryview = b"",
    ) -> "RowBatch":
        """The rows of shard number `slot` that some bytes hold, as views of them; of those deleted, ids alone.
        Digests may be missing.

        Raises:
            InvalidInput: no such shard, or lengths that do not fit it.
        """
        if slot >= len(shards):
            raise InvalidInput(f"rows for slot {slot}, but only {len(shards)} were announced")
        shard = shards[slot]
        count, rest = divmod(len(raw_ids), ID_TYPE.itemsize)
        if rest:
            raise InvalidInput(
                f"table {shard.table.name!r}: {len(raw_ids)} bytes of ids, expected a multiple of 8"
            )
        expected = 0 if deleted else count * shard.cols * shard.table.dtype.itemsize
        if len(raw_values) != expected:
            raise InvalidInput(
                f"table {shard.table.name!r}: {len(raw_values)} bytes of values for {counted(count, 'row')} of "
                f"{shard.cols} {shard.table.dtype} values, expected {expected}: does the row's dimension or "
                "type differ?"
            )
        if raw_digests and len(raw_digests) != count * DIGEST_TYPE.itemsize:
            raise InvalidInput(
                f"table {shard.table.name!r}: {len(raw_digests)} bytes of digests for {counted(count, 'row')}, "
                "not 8 each"
            )
        if deleted:
            return cls.deletes(shard, np.frombuffer(raw_ids, ID_TYPE))
        values = np.frombuffer(raw_values, shard.table.dtype).reshape(count, shard.cols)
        digests = np.frombuffer(raw_digests, DIGEST_TYPE) if raw_digests else None
        return cls(shard, np.frombuffer(raw_ids, ID_TYPE), values, digests=digests)

    def check(self) -> None:
        """Check rows against the rules that every sender has to keep.

        Raises:
            InvalidInput: no rows, ids outside the shard or not strictly ascending, NaN or infinity, or a delete of
                what is no embedding.
        """
        shard, ids = self.shard, self.ids
        name, first, last = shard.table.name, shard.row_offset, shard.row_offset + shard.rows
        if not len(ids):
            raise InvalidInput(f"table {name!r}: a chunk without rows")
        if np.any(ids[1:] <= ids[:-1]):
            raise InvalidInput(f"table {name!r}: ids must be strictly ascending inside a chunk")
        if ids[0] < first or ids[-1] >= last:
            bad = int(ids[0]) if ids[0] < first else int(ids[-1])
            raise InvalidInput(f"table {name!r}: row id {bad} is outside this rank's rows {first} to {last - 1}")
        if self.deleted and not shard.table.kind.ranked:
            raise InvalidInput(
                f"table {name!r} is of kind {shard.table.kind.value!r}: only embeddings are deleted"
            )
        if shard.table.kind.trained and not self.deleted:
            self._check_finite()

    def check_digests(self) -> None:
        """Check that rows are those of which their digests were made.

        Raises:
            Damaged: one is not.
        """
        if self.digests is None or self.deleted:
            return
        wrong = np.flatnonzero(row_digests(self.values, self.shard.col_offset) != self.digests)
        if len(wrong):
            raise Damaged(
                f"table {self.shard.table.name!r}: {len(wrong)} of {len(self)} rows do not fit their digests, the "
                f"first of them row id {int(self.ids[wrong[0]])}: bits have changed since these were made"
            )

    def _check_finite(self) -> None:
        finite = np.isfinite(self.values)
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            where = f"row {int(self.ids[row])} holds {self.values[row, column]} in column"
            raise InvalidInput(
                f"table {self.shard.table.name!r}: {where} {self.shard.col_offset + column}; "
                "NaN and infinity are not published"
            )


T = TypeVar("T", bound=np.generic)


def distinct(numbers: NDArray[T]) -> NDArray[T]:
    """The set of some whole numbers ([n], in any order)."""
    ordered = np.sort(numbers, kind="stable")  # Which merges what is sorted in parts.
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def members(ids: Ids, others: Ids) -> Mask:
    """Which of the `ids` [n] are among the others [m]."""
    found = np.empty(len(ids), np.bool_)
    dirty_rows.members(ids, others, found)
    return found


def contiguous(ids: Ids) -> slice | None:
    """The slice that strictly ascending `ids` cover, if they leave no gap."""
    if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None


@dataclass(frozen=True, eq=False)
class DeleteRequest:
    """Rows to be deleted by all ranks that have some of them, after the same step.

    Attributes:
        number: nanoseconds since 1970 when it was asked for, made later than that of any other that is pending.
        table: the table's name.
        ids: [n] int64, global row ids, strictly ascending.
    """

    number: int
    table: str
    ids: Ids


_NAMED_RANGES = 5


class DamagedRows(Damaged):
    """Rows of a table that do not fit their digests. No caller is given them.

    Attributes:
        table: the table's name.
        ids: [n], strictly ascending.
    """

    def __init__(self, table: str, ids: Ids) -> None:
        super().__init__(f"table {table!r}: other bits than were stored in {ranges(ids)}")
        self.table = table
        self.ids = ids


def ranges(ids: Ids) -> str:
    """Some row ids [n], strictly ascending, in words: `rows 3, 7 to 9`, or `row 3`."""
    named = list(_ranges(ids))
    others = len(named) - _NAMED_RANGES
    words = ", ".join(
        f"{first}" if first == last else f"{first} to {last}" for first, last in named[:_NAMED_RANGES]
    )
    return f"{'row' if len(ids) == 1 else 'rows'} {words}" + (f" and {others} other ranges" if others > 0 else "")


def _ranges(ids: Ids) -> Iterator[tuple[int, int]]:
    ends = np.flatnonzero(np.diff(ids) != 1)
    firsts, lasts = ids[np.append(0, ends + 1)], ids[np.append(ends, len(ids) - 1)]
    return zip(firsts.tolist(), lasts.tolist(), strict=True)
