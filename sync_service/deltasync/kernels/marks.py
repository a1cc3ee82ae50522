"""Marks of rows that have changed, a bit for each row, and their stamps.

A stamp is the number of what a row has changed with, or its opposite where that has deleted the row; 0 = never.
Marks come in words of 64 rows. `newest` has the largest stamp of the rows of each word, signs apart: a scan looks
at no other words than those with a later one.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import inlined, intrinsic, kernel, readable, writable

WORD_ROWS = 64

trailing_zeros = intrinsic("numba.cpython.unsafe.numbers", "trailing_zeros")

Ids = NDArray[np.int64]
Marks = NDArray[np.uint64]
Stamps = NDArray[np.int32]

_U64, _I64 = np.uint64, np.int64
_STAMPS = readable(types.int32, 1)
_INTEGERS = (types.int32, types.int64)


@inlined
def _mark(ids, rows, marks):  # type: ignore[no-untyped-def]
    for index in range(ids.shape[0]):
        row = _U64(ids[index])  # Negative ids are the largest.
        row = row if row < _U64(rows) else _U64(0)
        marks[row >> _U64(6)] |= _U64(1) << (row & _U64(63))


@kernel(*(types.void(readable(ids, 1), types.int64, writable(types.uint64, 1)) for ids in _INTEGERS))
def mark(ids: NDArray[np.signedinteger], rows: int, marks: Marks) -> None:
    """Mark the rows `ids` [n], in any order and number, of a table of `rows`; for an id that is none, row 0."""
    _mark(ids, rows, marks)


@kernel(
    *(
        types.int64(
            readable(ids, 1),
            readable(ends, 1),
            types.int64,
            readable(types.int64, 2),
            writable(types.uint64, 1),
            writable(types.int64, 2),
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
    """Mark the rows of several tables that a lookup has ids of, as `mark` does.

    Args:
        ids: [n], key by key.
        ends: where the ids of each key begin and end, [keys + 1]; or those of each bag, [bags + 1], as many of
            each key.
        keys: number of keys.
        tables: [tables, 5]: its place in `counts`, its first key and the one after its last, its first word of
            marks, its rows.
        marks: of all tables, one after the other.
        counts: [any number of counts, tables], to each of which the number of its ids is added.

    Returns:
        How many ids there are of these tables.
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
    types.int64(
        writable(types.uint64, 1),
        types.int32,
        writable(types.int32, 1),
        writable(types.int32, 1),
        writable(types.int64, 1),
    )
)
def settle(marks: Marks, stamp: int, stamps: Stamps, newest: Stamps, ids: Ids) -> int:
    """Stamp the rows that are marked, and unmark them.

    Args:
        marks: [words].
        stamp: no less than any there is.
        stamps: [rows].
        newest: [words].
        ids: room for those of the rows marked, which are written here in their order.

    Returns:
        How many there are.
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


@kernel(types.void(_STAMPS, writable(types.int32, 1)))
def find_newest(stamps: Stamps, newest: Stamps) -> None:
    """Set `newest` [words] to what is true of `stamps` [rows]."""
    for word in range(newest.shape[0]):
        largest = np.int32(0)
        for row in range(word * WORD_ROWS, min((word + 1) * WORD_ROWS, stamps.shape[0])):
            largest = max(largest, abs(stamps[row]))
        newest[word] = largest


@inlined
def _later_rows(stamps, first, rows, cursor, sign):  # type: ignore[no-untyped-def]
    """Which of so many rows are later: bits."""
    bits = _U64(0)
    for row in range(rows):
        bits |= _U64(stamps[first + row] * sign > cursor) << _U64(row)
    return bits


@inlined
def _later_rows_of_word(stamps, word, cursor, sign):  # type: ignore[no-untyped-def]
    first = word * WORD_ROWS
    if first + WORD_ROWS <= stamps.shape[0]:  # A number that the compiler knows makes it many times as fast.
        return _later_rows(stamps, first, WORD_ROWS, cursor, sign)
    return _later_rows(stamps, first, stamps.shape[0] - first, cursor, sign)


@kernel(types.int64(_STAMPS, _STAMPS, types.int32, types.int32, writable(types.int64, 1)))
def list_later(stamps: Stamps, newest: Stamps, cursor: int, sign: int, ids: Ids) -> int:
    """Write the rows of which the stamp times `sign` is above `cursor` into `ids`, in their order.

    `ids` has room for all rows of the words with a later stamp.

    Returns:
        How many there are.
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
