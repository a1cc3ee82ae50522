"""Copy rows into tables and out of them, by number.

A row has words of 1, 2 or 4 bytes. Callers must check that the rows exist.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    float32,
    float64,
    int64,
    kernel,
    readable,
    tuple_of,
    uint8,
    uint32,
    uint64,
    void,
    writable,
)
from deltasync.kernels.digests import WORDS, Digests, share, square
from deltasync.kernels.instructions import AHEAD, ask_for_row, ask_for_written_number, ask_for_written_row

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]
Numbers = NDArray[np.int64]

_U64 = np.uint64
_IDS, _WEIGHTS = readable(int64, 1), readable(uint64, 1)

# Loops over words have unsigned indices. Numba checks signed ones for negative values, and cannot vectorise then.


@kernel(*(void(readable(word), _IDS, writable(word)) for word in WORDS))
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
        int64(
            readable(word), readable(uint64, 1), _IDS, _WEIGHTS, writable(word), writable(uint64, 1)
        )
        for word in WORDS
    )
)  # fmt: skip
def gather_checked(
    table: Words, digests: Digests, ids: Numbers, weights: Digests, rows: Words, row_digests: Digests
) -> int | np.int64:
    """Copy rows `ids` [n] of a table [N, w] with stored digests [N] into `rows` [n, w], and compute their digests.

    Returns the number of rows that do not match their stored digests.
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


@kernel(*(void(writable(word), uint64, _IDS, readable(word)) for word in WORDS), nogil=False)
def scatter(table: Words, first: int, ids: Numbers, rows: Words) -> None:
    """Copy rows [n, w] to the rows `ids` [n] of a table [N, W], beginning at its word `first`.

    It keeps the GIL, because readers wait for a release that may take many calls.
    """
    for index in range(ids.shape[0]):
        row = _U64(ids[index])
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]


@kernel(
    *(
        void(
            writable(uint8), readable(word), _IDS, readable(uint8), _WEIGHTS, writable(uint64, 1)
        )
        for word in WORDS
    ),
    nogil=False,
)  # fmt: skip
def put(table: Bytes, words: Words, ids: Numbers, rows: Bytes, weights: Digests, row_digests: Digests) -> None:
    """Copy rows [n, b] to the rows `ids` of a table [N, B], and digest each from the table's memory.

    It keeps the GIL, like `scatter`. `words` [N, W] is the same memory as `table`. `rows` need not be aligned,
    such as those of a message.
    """
    width = _U64(table.shape[1])
    for index in range(ids.shape[0]):
        if index + AHEAD < ids.shape[0]:
            ask_for_written_row(table, width, ids[index + AHEAD])
        row = _U64(ids[index])
        for byte in range(_U64(rows.shape[1])):
            table[row, byte] = rows[index, byte]
        # In a separate loop, because the same one would digest its input, and read what it is about to write.
        total = _U64(0)
        for word in range(_U64(weights.shape[0])):
            total += _U64(words[row, word]) * weights[word]
        row_digests[index] = total


@kernel(
    *(
        tuple_of(uint64, float64, int64)(
            writable(word), writable(int64, 1), writable(uint64, 1), readable(number), uint64,
            uint64, _IDS, _IDS, readable(word), _IDS, _WEIGHTS, readable(number), _WEIGHTS,
        )
        for word, number in (*((word, float32) for word in WORDS), (uint32, float64))
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
) -> tuple[np.uint64, float, np.int64]:
    """Write rows [n, w] at `slots` of a table [N, W], from its word `first` on, with stamps and digests.

    `row_stamps` are [n], or [1] for all. `row_digests` are those of the written words; [0] to compute them here,
    if `rows` are whole rows. `weights` are [w]; [0] for whole rows whose given digests are not checked.
    `row_floats` are the numbers of `rows`, from number `first_float` of the table's `floats` on; [n, 0] if no sum
    of squares is kept. Returns the changes of the table's checksum and sum of squares, and the number of wrong
    digests.
    """
    change, square_change, wrong = _U64(0), np.float64(0), np.int64(0)
    whole = rows.shape[1] == table.shape[1]
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
        for word in range(_U64(weights.shape[0])):
            after += _U64(rows[index, word]) * weights[word]
        if row_digests.shape[0]:
            wrong += weights.shape[0] > 0 and after != row_digests[index]
            after = row_digests[index]
        if not whole:
            # Earlier digests matter only for rows of which some words stay.
            after += before
            for word in range(_U64(rows.shape[1])):
                after -= _U64(table[row, first + word]) * weights[word]
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]
        stamps[row] = row_stamps[min(index, last_stamp)]
        digests[row] = after
        change += share(ids[index], after) - share(ids[index], before)
    return change, square_change, wrong
