"""Rows into tables and out of them, by number.

A row is so many words of 1, 2 or 4 bytes. Whoever calls has checked that there are rows of these numbers.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import kernel, readable, writable
from deltasync.kernels.digests import WORDS, Digests, share
from deltasync.kernels.prefetch import AHEAD, ask_for_row, ask_for_written_row, ask_for_written_tag
from deltasync.kernels.tags import Tags, tag

Words = NDArray[np.unsignedinteger]
Numbers = NDArray[np.int64]
Squares = NDArray[np.float32]

_U64 = np.uint64
_IDS, _WEIGHTS = readable(types.int64, 1), readable(types.uint64, 1)
# What is written down of each row beside its words: stamps, tags, the table's key, digests, squares.
_COLUMNS = (
    writable(types.int64, 1),
    writable(types.uint16, 1),
    types.uint64,
    writable(types.uint64),
    writable(types.float32),
)
_CHANGE = types.tuple_of(types.uint64, types.float64)

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
            readable(word), readable(types.uint64), _IDS, _WEIGHTS, writable(word), writable(types.uint64, 1)
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
        digests: [N, segments] that are kept of its rows.
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
        total, kept = _U64(0), _U64(0)
        for word in range(_U64(rows.shape[1])):
            bits = table[row, word]
            rows[index, word] = bits
            total += _U64(bits) * weights[word]
        for each in range(_U64(digests.shape[1])):
            kept += digests[row, each]
        row_digests[index] = total
        wrong += total != kept
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
        _CHANGE(
            writable(word), *_COLUMNS, types.uint64, types.uint64, _IDS,
            readable(word), readable(types.uint64), readable(types.float32), types.int64,
        )
        for word in WORDS
    )
)  # fmt: skip
def write(
    table: Words,
    stamps: Numbers,
    tags: Tags,
    key: int,
    digests: Digests,
    squares: Squares,
    first: int,
    segment: int,
    ids: Numbers,
    rows: Words,
    row_digests: Digests,
    row_squares: Squares,
    stamp: int,
) -> tuple[np.uint64, float]:
    """Write rows, their stamp, their tags, their digests and their squared norms.

    Args:
        table: [N, W].
        stamps: [N].
        tags: [N].
        key: of the table, for its tags.
        digests: [N, segments].
        squares: [N, segments]; [0, segments] where they are not kept.
        first: the word of the table's rows that is the first of `rows`.
        segment: the segment of the table's columns that is the first of `row_digests`.
        ids: [n].
        rows: [n, w].
        row_digests: [n, k], by segment.
        row_squares: [n, k], likewise; [0, k] where they are not kept.
        stamp: the stamp.

    Returns:
        By how much the table's checksum changes, and the sum of its squares.
    """
    change, square_change = _U64(0), 0.0
    width = _U64(table.shape[1] * table.itemsize)
    for index in range(ids.shape[0]):
        if index + AHEAD < ids.shape[0]:
            ask_for_written_row(table, width, ids[index + AHEAD])
            ask_for_written_tag(tags, digests, ids[index + AHEAD])
        row = _U64(ids[index])
        # The stamp first: if the process dies between the two, a row with a new stamp is sent again, while one
        # with an old stamp would be taken for the old row.
        stamps[row] = stamp
        before = _U64(0)
        for each in range(_U64(digests.shape[1])):
            before += digests[row, each]
        after = before
        for each in range(_U64(row_digests.shape[1])):
            after += row_digests[index, each] - digests[row, segment + each]
            digests[row, segment + each] = row_digests[index, each]
        change += share(row, after) - share(row, before)
        tags[row] = tag(key, row, stamp, after)
        if squares.shape[0]:
            for each in range(_U64(row_squares.shape[1])):
                square_change += np.float64(row_squares[index, each]) - np.float64(squares[row, segment + each])
                squares[row, segment + each] = row_squares[index, each]
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]
    return change, square_change


@kernel(
    *(
        _CHANGE(writable(word), *_COLUMNS, *(types.uint64,) * 4, _IDS, types.int64)
        for word in WORDS
    )
)  # fmt: skip
def clear(
    table: Words,
    stamps: Numbers,
    tags: Tags,
    key: int,
    digests: Digests,
    squares: Squares,
    first: int,
    last: int,
    segment: int,
    last_segment: int,
    ids: Numbers,
    stamp: int,
) -> tuple[np.uint64, float]:
    """Delete rows: make zeros of their words from `first` to before `last`, and of what is kept of the
    segments from `segment` to before `last_segment`. Where words are left, the rest of the row is still there:
    then its stamp is `stamp`, otherwise `-stamp`.

    Returns:
        As `write`.
    """
    change, square_change = _U64(0), 0.0
    for index in range(ids.shape[0]):
        row = _U64(ids[index])
        stamps[row] = -stamp
        for word in range(_U64(table.shape[1])):
            if (word < first or word >= last) and table[row, word]:
                stamps[row] = stamp
        before = _U64(0)
        for each in range(_U64(digests.shape[1])):
            before += digests[row, each]
        after = before
        for each in range(segment, last_segment):
            after -= digests[row, each]
            digests[row, each] = _U64(0)
            if squares.shape[0]:
                square_change -= np.float64(squares[row, each])
                squares[row, each] = 0.0
        change += share(row, after) - share(row, before)
        tags[row] = tag(key, row, stamps[row], after)
        for word in range(first, last):
            table[row, word] = 0
    return change, square_change
