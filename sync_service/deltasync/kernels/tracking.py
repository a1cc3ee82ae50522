"""Kernels of the tracker: marks of changed rows, copies that follow changes, and maps of raw ids.

A mark is a bit for each row. A stamp is the number with which a row last changed, negative if that deleted the
row; 0 = never. Marks are in words of 64 rows. `newest` has the largest absolute stamp of the rows of each word, so
that a scan reads only words with a later one.

Maps from raw ids to rows are sorted by raw id, and read as the raw id of each row.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    inlined,
    int32,
    int64,
    intrinsic,
    kernel,
    readable,
    uint8,
    uint16,
    uint32,
    uint64,
    void,
    writable,
)

WORD_ROWS = 64

trailing_zeros = intrinsic("numba.cpython.unsafe.numbers", "trailing_zeros")

Ids = NDArray[np.int64]
Marks = NDArray[np.uint64]
Stamps = NDArray[np.int32]

_U64, _I64 = np.uint64, np.int64
_STAMPS = readable(int32, 1)
_INTEGERS = (int32, int64)


@inlined
def _mark(ids, rows, marks):  # type: ignore[no-untyped-def]
    for index in range(ids.shape[0]):
        row = _U64(ids[index])  # Negative ids become very large.
        row = row if row < _U64(rows) else _U64(0)
        marks[row >> _U64(6)] |= _U64(1) << (row & _U64(63))


@kernel(*(void(readable(ids, 1), int64, writable(uint64, 1)) for ids in _INTEGERS))
def mark(ids: NDArray[np.signedinteger], rows: int, marks: Marks) -> None:
    """Mark the rows `ids` [n], in any order, of a table of `rows`; an invalid id marks row 0."""
    _mark(ids, rows, marks)


@kernel(
    *(
        int64(
            readable(ids, 1),
            readable(ends, 1),
            int64,
            readable(int64, 2),
            writable(uint64, 1),
            writable(int64, 2),
        )
        for ids in _INTEGERS
        for ends in _INTEGERS
    )
)
def mark_looked_up(
    ids: NDArray[np.signedinteger],
    ends: NDArray[np.signedinteger],
    keys: int,
    tables: NDArray[np.int64],
    marks: Marks,
    counts: NDArray[np.int64],
) -> int:
    """Mark the rows of several tables that a lookup used, like `mark`; return the number of their ids.

    `ids` are in order of their keys; `ends` bound those of each key, or of each of equally many bags per key. A
    row of `tables` has its column in `counts`, its first key, the key after its last, its first word of `marks`,
    and its rows. The numbers of ids are added to each row of `counts`.
    """
    total, bags = 0, (ends.shape[0] - 1) // keys
    for number, first_key, end_key, first_word, rows in tables:
        if bags <= 0 or rows == 0:
            continue
        first, end = max(_I64(0), _I64(ends[first_key * bags])), min(_I64(ends[end_key * bags]), ids.shape[0])
        _mark(ids[first:end], rows, marks[first_word:])
        counts[:, number] += max(_I64(0), end - first)
        total += max(_I64(0), end - first)
    return total


@kernel(
    int64(
        writable(uint64, 1),
        int32,
        writable(int32, 1),
        writable(int32, 1),
        writable(int64, 1),
    )
)
def settle(marks: Marks, stamp: int, stamps: Stamps, newest: Stamps, ids: Ids) -> int:
    """Stamp the marked rows, remove their marks, and write their ids to `ids`; return their number.

    `stamp` is at least the largest stamp so far.
    """
    count = 0
    for word in range(marks.shape[0]):
        left = marks[word]
        if left:
            marks[word] = _U64(0)
            newest[word] = stamp
            while left:
                row = _I64(word) * WORD_ROWS + _I64(trailing_zeros(left))
                left &= left - _U64(1)
                stamps[row] = stamp
                ids[count] = row
                count += 1
    return count


@kernel(void(_STAMPS, writable(int32, 1)))
def find_newest(stamps: Stamps, newest: Stamps) -> None:
    """Compute `newest` [words] from `stamps` [rows]."""
    for word in range(newest.shape[0]):
        largest = np.int32(0)
        for row in range(word * WORD_ROWS, min((word + 1) * WORD_ROWS, stamps.shape[0])):
            largest = max(largest, abs(stamps[row]))
        newest[word] = largest


@inlined
def _later_rows(stamps, first, rows, cursor, sign):  # type: ignore[no-untyped-def]
    """The later ones of `rows` rows, as bits."""
    bits = _U64(0)
    for row in range(rows):
        bits |= _U64(stamps[first + row] * sign > cursor) << _U64(row)
    return bits


@inlined
def _later_rows_of_word(stamps, word, cursor, sign):  # type: ignore[no-untyped-def]
    first = word * WORD_ROWS
    if first + WORD_ROWS <= stamps.shape[0]:  # A constant number of rows makes it many times faster.
        return _later_rows(stamps, first, WORD_ROWS, cursor, sign)
    return _later_rows(stamps, first, stamps.shape[0] - first, cursor, sign)


@kernel(int64(_STAMPS, _STAMPS, int32, int32, writable(int64, 1)))
def list_later(stamps: Stamps, newest: Stamps, cursor: int, sign: int, ids: Ids) -> int:
    """Write the rows whose stamp times `sign` is above `cursor` to `ids`, in order; return their number.

    `ids` must have room for all rows of words with a later stamp.
    """
    count = 0
    for word in range(newest.shape[0]):
        if newest[word] > cursor:
            left = _later_rows_of_word(stamps, word, cursor, sign)
            while left:
                ids[count] = word * WORD_ROWS + _I64(trailing_zeros(left))
                left &= left - _U64(1)
                count += 1
    return count


# Find and copy the changes since the last copy in one pass.

Words = NDArray[np.unsignedinteger]

_WRITTEN_IDS = writable(int64, 1)
_BLOCK_WORDS = 1024

# Loops over words have unsigned indices. Numba checks signed ones for negative values, and cannot vectorise then.


@inlined
def _differ(words, others, first, end):  # type: ignore[no-untyped-def]
    """Compare without an early exit, which would be slower."""
    differing = words[first] ^ others[first]
    for index in range(first, end):
        differing |= words[index] ^ others[index]
    return differing != 0


@kernel(*(int64(readable(word, 1), uint64, writable(word, 1), _WRITTEN_IDS) for word in (uint8, uint16, uint32)))
def follow_rows(rows: Words, width: int, copy: Words, ids: Ids) -> int:
    """Update a copy of rows, given as bits [n * width], and write the ids of changed rows to `ids` [n].

    Returns the number of changed rows.
    """
    count = 0
    block = max(_U64(1), _U64(_BLOCK_WORDS) // width) * width
    for start in range(_U64(0), _U64(rows.shape[0]), block):
        end = min(start + block, _U64(rows.shape[0]))
        if not _differ(rows, copy, start, end):
            continue
        for first in range(start, end, width):
            if _differ(rows, copy, first, first + width):
                for word in range(first, first + width):
                    copy[word] = rows[word]
                ids[count] = first // width
                count += 1
    return count


@kernel(int64(readable(int64, 1), int64, int64, writable(int64, 1), _WRITTEN_IDS))
def follow_numbers(numbers: Ids, flip: int, none: int, copy: Ids, ids: Ids) -> int:
    """Update `copy` [n] from `numbers` [n], with the bits `flip` flipped, and 0 in place of `none`.

    Writes the indices of changed numbers to `ids` [n], and returns how many changed. If `none` is 0, all numbers
    are valid.
    """
    count = 0
    for start in range(_U64(0), _U64(numbers.shape[0]), _U64(_BLOCK_WORDS)):
        end = min(start + _U64(_BLOCK_WORDS), _U64(numbers.shape[0]))
        differing = np.int64(0)
        for index in range(start, end):
            differing |= (np.int64(0) if numbers[index] == none else numbers[index] ^ flip) ^ copy[index]
        if differing == 0:
            continue
        for index in range(start, end):
            number = np.int64(0) if numbers[index] == none else numbers[index] ^ flip
            if number != copy[index]:
                copy[index] = number
                ids[count] = index
                count += 1
    return count


# Maps of raw ids.

UNSOUND = -1
_FREE = np.iinfo(np.int64).max
_READ_IDS = readable(int64, 1)


@kernel(int64(_READ_IDS, _READ_IDS, int64, int64, int64, writable(int64, 1)))
def read_sorted(raw_ids: Ids, rows: Ids, row_offset: int, first: int, end: int, column: Ids) -> int:
    """Write the raw id of each row, with all bits except the sign flipped, to `column`, which is zeros.

    `raw_ids` ascend, and the largest int64 stands for none; `rows` has the row of each, plus `row_offset`. Returns
    the number of raw ids outside of `first` to `end`; `UNSOUND`, with a useless column, if raw ids do not ascend,
    or a row does not exist or occurs twice.
    """
    outside = taken = 0
    before = np.int64(0)
    for index in range(raw_ids.shape[0]):
        raw = raw_ids[index]
        if raw == _FREE:
            continue
        row = rows[index] - row_offset
        if (taken and raw <= before) or row < 0 or row >= column.shape[0] or column[row] != 0:
            return UNSOUND
        column[row] = raw ^ _FREE
        outside += (raw < first) | (raw >= end)
        taken += 1
        before = raw
    return outside
