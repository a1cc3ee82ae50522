"""Rows into tables and out of them, by number.

A row is so many words of 1, 2 or 4 bytes. Whoever calls has checked that there are rows of these numbers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import kernel, readable, writable
from deltasync.kernels.digests import WORDS, Digests, share, square
from deltasync.kernels.prefetch import AHEAD, ask_for_row, ask_for_written_number, ask_for_written_row

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]
Numbers = NDArray[np.int64]

_U64 = np.uint64
_IDS, _WEIGHTS = readable(types.int64, 1), readable(types.uint64, 1)

# Words are counted without a sign: a number that could be negative is looked at each time, and nothing vectorises.


@kernel(*(types.void(readable(word), _IDS, writable(word)) for word in WORDS))
def gather(table: Words, ids: Numbers, rows: Words) -> None:
    """Copy the rows `ids` [n] of a table [N, w] into `rows` [n, w]."""
    width = _U64(table.shape[1] * table.itemsize)
    for index in range(ids.shape[0]):
        if index + AHEAD < ids.shape[0]:
            ask_for_row(table, width, ids[index + AHEAD])
        row = _U64(ids[index])
        for word in range(_U64(rows.shape[1])):
            rows[index, word] = table[row, word]


@kernel(
    *(
        types.int64(
            readable(word), readable(types.uint64, 1), _IDS, _WEIGHTS, writable(word), writable(types.uint64, 1)
        )
        for word in WORDS
    )
)  # fmt: skip
def gather_checked(
    table: Words, digests: Digests, ids: Numbers, weights: Digests, rows: Words, row_digests: Digests
) -> int | np.int64:
    """Copy rows of a table, and check them.

    Args:
        table: [N, w].
        digests: [N] that are kept of its rows.
        ids: [n] which rows.
        weights: [w] of the words of a row.
        rows: [n, w] are set.
        row_digests: [n] are set to the digests of what was copied.

    Returns:
        How many rows do not fit the digests that are kept of them.
    """
    wrong = np.int64(0)
    width = _U64(table.shape[1] * table.itemsize)
    for index in range(ids.shape[0]):
        if index + AHEAD < ids.shape[0]:
            ask_for_row(table, width, ids[index + AHEAD])
        row = _U64(ids[index])
        total = _U64(0)
        for word in range(_U64(rows.shape[1])):
            bits = table[row, word]
            rows[index, word] = bits
            total += _U64(bits) * weights[word]
        row_digests[index] = total
        wrong += total != digests[row]
    return wrong


@kernel(*(types.void(writable(word), types.uint64, _IDS, readable(word)) for word in WORDS), nogil=False)
def scatter(table: Words, first: int, ids: Numbers, rows: Words) -> None:
    """Copy rows [n, w] to the rows `ids` [n] of a table [N, W], from its word `first` on.

    It keeps other Python threads out: readers wait for a release that may be scattered in many calls.
    """
    for index in range(ids.shape[0]):
        row = _U64(ids[index])
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]


@kernel(
    *(
        types.void(
            writable(types.uint8), readable(word), _IDS, readable(types.uint8), _WEIGHTS, writable(types.uint64, 1)
        )
        for word in WORDS
    ),
    nogil=False,
)  # fmt: skip
def put(table: Bytes, words: Words, ids: Numbers, rows: Bytes, weights: Digests, row_digests: Digests) -> None:
    """Copy rows to the rows `ids` of a table, and digest each as it then lies there.

    It keeps other Python threads out, as `scatter` does.

    Args:
        table: [N, B] bytes.
        words: [N, W], the same memory.
        ids: [n].
        rows: [n, b] bytes, wherever they begin: those of a message need not be aligned.
        weights: [w] of the words of a row.
        row_digests: [n] are set to the digests of what the table holds.
    """
    width = _U64(table.shape[1])
    for index in range(ids.shape[0]):
        if index + AHEAD < ids.shape[0]:
            ask_for_written_row(table, width, ids[index + AHEAD])
        row = _U64(ids[index])
        for byte in range(_U64(rows.shape[1])):
            table[row, byte] = rows[index, byte]
        # Not in the same loop, which would digest what it was given, and read what it is about to write.
        total = _U64(0)
        for word in range(_U64(weights.shape[0])):
            total += _U64(words[row, word]) * weights[word]
        row_digests[index] = total


@kernel(
    *(
        types.tuple_of(types.uint64, types.float64)(
            writable(word), writable(types.int64, 1), writable(types.uint64, 1), readable(number), types.uint64,
            types.uint64, _IDS, _IDS, readable(word), _IDS, _WEIGHTS, readable(number), _WEIGHTS,
        )
        for word, number in (*((word, types.float32) for word in WORDS), (types.uint32, types.float64))
    ),
    any_order=True,
)  # fmt: skip
def write(
    table: Words,
    stamps: Numbers,
    digests: Digests,
    floats: NDArray[Any],
    first: int,
    first_float: int,
    slots: Numbers,
    ids: Numbers,
    rows: Words,
    row_stamps: Numbers,
    row_digests: Digests,
    row_floats: NDArray[Any],
    weights: Digests,
) -> tuple[np.uint64, float]:
    """Write rows, their stamps and their digests.

    Args:
        table: [N, W].
        stamps: [N].
        digests: [N].
        floats: [N, D], the table's numbers where the sum of their squares is wanted.
        first: the word of the table's rows that is the first of `rows`.
        first_float: likewise, the number.
        slots: [n], where the rows are in the table's arrays.
        ids: [n], of the rows.
        rows: [n, w].
        row_stamps: [n], or [1] for all.
        row_digests: [n], of these words; [0] if `rows` have all words of a row, and are to be digested here.
        row_floats: [n, d], the numbers of `rows`; [n, 0] where the sum of squares is not wanted.
        weights: [w] of the words that are overwritten; [0] if these are all words of a row, and digests are given.

    Returns:
        By how much the table's checksum changes, and the sum of the squares of its numbers.
    """
    change, square_change = _U64(0), np.float64(0)
    width = _U64(table.shape[1] * table.itemsize)
    last_stamp = row_stamps.shape[0] - 1
    for index in range(slots.shape[0]):
        if index + AHEAD < slots.shape[0]:
            ahead = slots[index + AHEAD]
            ask_for_written_row(table, width, ahead)
            ask_for_written_number(stamps, ahead)
            ask_for_written_number(digests, ahead)
        row = _U64(slots[index])
        for column in range(_U64(row_floats.shape[1])):
            square_change += square(row_floats[index, column]) - square(floats[row, first_float + column])
        before, after = digests[row], _U64(0)
        if not row_digests.shape[0]:
            for word in range(_U64(rows.shape[1])):
                after += _U64(rows[index, word]) * weights[word]
        elif not weights.shape[0]:
            after = row_digests[index]
        else:
            after = before + row_digests[index]
            for word in range(_U64(rows.shape[1])):
                after -= _U64(table[row, first + word]) * weights[word]
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]
        stamps[row] = row_stamps[min(index, last_stamp)]
        digests[row] = after
        change += share(ids[index], after) - share(ids[index], before)
    return change, square_change
