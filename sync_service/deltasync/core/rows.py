"""Batches of rows, the type in which rows move everywhere, and the rules for senders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltasync.base.errors import Damaged, InvalidInput
from deltasync.base.words import listed
from deltasync.core.digests import RowDigests, row_digests, words_of
from deltasync.core.tables import ID_TYPE, VALUE_TYPES, Shard, TableSpec
from deltasync.kernels import dirty_rows, floats

# Rows are processed in blocks whose scratch memory fits the processor's cache.
BLOCK_ROWS = 4096

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.generic]
Norms: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]


def row_ids(table: str, ids: ArrayLike | Iterable[int]) -> Ids:
    """Convert row ids of a table to int64 [n]. Refuse bools and decimals, which NumPy and Python would convert."""
    if isinstance(ids, Iterable) and not hasattr(ids, "__array__"):
        numbers = list(ids)
        wrong = {each for each in set(map(type, numbers)) if each is bool or not issubclass(each, Integral)}
        if wrong:
            kinds = listed(each.__name__ for each in wrong)
            raise InvalidInput(f"table {table!r}: ids of type {kinds}, expected integers")
        try:
            return np.array(numbers, ID_TYPE)
        except OverflowError as error:
            raise _too_large(table) from error
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        text = f"ids of type {array.dtype} and shape {list(array.shape)}, expected integers [n]"
        raise InvalidInput(f"table {table!r}: {text}")
    if array.dtype == np.uint64 and len(array) and array.max() > np.iinfo(ID_TYPE).max:
        raise _too_large(table)
    return array.astype(ID_TYPE, copy=False)


def _too_large(table: str) -> InvalidInput:
    # Without the id, which may have thousands of digits.
    return InvalidInput(
        f"table {table!r}: an id does not fit into 64 bits, expected at most {np.iinfo(ID_TYPE).max}"
    )


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows of a shard, from the trainer's tracker to a replica's target, on the wire and in the log.

    Its arrays may be read-only views of a message or record.

    Attributes:
        shard: the shard; the whole table for releases.
        ids: [n] int64, global row ids, strictly ascending.
        values: [n, columns of the shard], of the table's type; [n, 0] for consumers with mode `ids`.
        norms: [n] fp32, L2 norms of the changes of the rows; None if they were not requested.
        digests: [n] uint64, digests of the rows, see `core.digests`; None if they were not made. They cover the
            shard's columns; for encoded rows, the rows as replicas hold them.
        deleted: whether the rows are deleted. Their values are zeros, like rows that never changed, and not sent.
        encoded: the `Rows` message with exactly these rows, to which the arrays refer. It goes to the log and to
            replicas unchanged. None if there is none yet.
    """

    shard: Shard
    ids: Ids
    values: Values
    norms: Norms | None = None
    deleted: bool = False
    digests: RowDigests | None = None
    encoded: memoryview | None = None

    @classmethod
    def deletes(cls, shard: Shard, ids: ArrayLike, encoded: memoryview | None = None) -> "RowBatch":
        """Make deletes for rows of a shard. Their zeros take no memory.

        Raises:
            InvalidInput: the ids are not integers, see `row_ids`.
        """
        ids = row_ids(shard.table.name, ids)
        zeros = np.broadcast_to(np.zeros((), shard.table.dtype), (len(ids), shard.cols))
        return cls(shard, ids, zeros, deleted=True, encoded=encoded)

    @classmethod
    def of_table(cls, table: TableSpec, ids: ArrayLike, values: Values, norms: Norms | None = None) -> "RowBatch":
        """Make a batch of whole rows of a table.

        Raises:
            InvalidInput: the ids are not integers, see `row_ids`.
        """
        return cls(Shard.whole(table), row_ids(table.name, ids), values, norms)

    @property
    def table(self) -> TableSpec:
        """The table of the shard."""
        return self.shard.table

    @property
    def nbytes(self) -> int:
        """Size of ids and values as sent, in bytes."""
        return self.ids.nbytes + (0 if self.deleted else self.values.nbytes)

    @property
    def message_bytes(self) -> int:
        """Size of ids, digests and values in a message and in memory, in bytes."""
        return self.nbytes + (0 if self.digests is None else self.digests.nbytes)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "RowBatch":
        """A slice of the rows, as views."""
        norms = None if self.norms is None else self.norms[rows]
        digests = None if self.digests is None else self.digests[rows]
        return RowBatch(self.shard, self.ids[rows], self.values[rows], norms, self.deleted, digests)

    def with_values(self, table: TableSpec, values: Values, norms: Norms | None = None) -> "RowBatch":
        """The same rows of a whole table with encoded or decoded values."""
        return replace(self, shard=Shard.whole(table), values=values, norms=norms, digests=None, encoded=None)

    def digested(self) -> "RowBatch":
        """The same rows with their digests. Deletes need none, because their digests are 0."""
        if self.deleted or self.digests is not None:
            return self
        return replace(self, digests=row_digests(self.values, self.shard.col_offset), encoded=None)

    def blocks(self, rows: int) -> Iterator["RowBatch"]:
        """Split the rows in order into views of at most `rows` rows."""
        if 0 < len(self.ids) <= rows:
            return iter((self,))
        return (self[start : start + rows] for start in range(0, len(self), rows))

    def check(self) -> None:
        """Check the rules for senders: ascending ids within the shard, finite values, only embeddings deleted."""
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
                f"table {name!r} is of kind {shard.table.kind.value!r}: only rows of embedding "
                "tables can be deleted"
            )
        if not shard.table.kind.trained or self.deleted:
            return
        values = self.values
        if values.dtype in VALUE_TYPES:  # NumPy would make a mask, and convert every fp16 number first.
            (infinity,) = words_of(np.array([np.inf], values.dtype))
            finite = bool(floats.all_finite(words_of(values).reshape(-1), infinity))
        else:
            finite = bool(np.isfinite(values).all())
        if not finite:
            row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
            where = f"row {int(ids[row])} holds {values[row, column]} in column {shard.col_offset + column}"
            raise InvalidInput(f"table {name!r}: {where}; NaN and infinity cannot be published")

    def check_digests(self) -> None:
        """Check that the rows match their digests."""
        if self.digests is None or self.deleted:
            return
        wrong = np.flatnonzero(row_digests(self.values, self.shard.col_offset) != self.digests)
        if len(wrong):
            raise Damaged(
                f"table {self.shard.table.name!r}: {len(wrong)} of {len(self)} rows do not match their digests, "
                f"first row id {int(self.ids[wrong[0]])}: bits have changed since the digests were made"
            )


def first_id(batch: RowBatch) -> int:
    """The smallest id of a batch with rows, to sort batches by."""
    return int(batch.ids[0])


def disjoint(batches: Sequence[RowBatch]) -> bool:
    """Whether each batch ends before the next one begins. They have rows, and are in the order of `first_id`."""
    return all(before.ids[-1] < after.ids[0] for before, after in pairwise(batches))


T = TypeVar("T", bound=np.generic)


def distinct(numbers: NDArray[T]) -> NDArray[T]:
    """Sort integers ([n]) and drop duplicates."""
    ordered = np.sort(numbers, kind="stable")  # This sort merges sorted parts.
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def members(ids: Ids, others: Ids) -> Mask:
    """Whether each of `ids` [n] is in `others` [m]; both are sorted."""
    mask = np.empty(len(ids), np.bool_)
    dirty_rows.members(ids, others, mask)
    return mask


def contiguous(ids: Ids) -> slice | None:
    """The slice that strictly ascending `ids` cover; None if they have gaps."""
    if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None


@dataclass(frozen=True, eq=False)
class DeleteRequest:
    """A request that all ranks delete their part of some rows after the same step.

    Attributes:
        number: request time in nanoseconds since 1970, later than that of any other pending request.
        ids: [n] int64, global row ids, strictly ascending.
    """

    number: int
    table: str
    ids: Ids


_NAMED_RANGES = 5


class DamagedRows(Damaged):
    """Rows of a table that do not match their digests. They are never sent.

    Attributes:
        ids: [n], strictly ascending.
    """

    def __init__(self, table: str, ids: Ids) -> None:
        super().__init__(f"table {table!r}: bits have changed in {ranges(ids)}")
        self.table = table
        self.ids = ids


def ranges(ids: Ids) -> str:
    """Format strictly ascending row ids [n]: `rows 3, 7 to 9`, or `row 3`."""
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
