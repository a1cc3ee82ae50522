"""Rows into tables and out of them, by number.

A row is so many words of 1, 2 or 4 bytes. Row numbers are not looked at: who calls has checked that they are
there.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from deltasync.kernels.compiled import kernel, readable, writable
from deltasync.kernels.digests import WORDS

Words = NDArray[np.unsignedinteger]
Numbers = NDArray[np.int64]

_U64 = np.uint64
_IDS = readable(types.int64, 1)

# Words are counted without a sign: a number that could be negative is looked at each time, and nothing vectorises.


@kernel(*(types.void(readable(word), _IDS, writable(word)) for word in WORDS))
def gather(table: Words, ids: Numbers, rows: Words) -> None:
    """Copy the rows `ids` [n] of a table [N, w] into `rows` [n, w]."""
    for index in range(ids.shape[0]):
        row = _U64(ids[index])
        for word in range(_U64(rows.shape[1])):
            rows[index, word] = table[row, word]


@kernel(*(types.void(writable(word), types.uint64, _IDS, readable(word)) for word in WORDS), nogil=False)
def scatter(table: Words, first: int, ids: Numbers, rows: Words) -> None:
    """Copy rows [n, w] to the rows `ids` [n] of a table [N, W], from its word `first` on.

    It keeps other Python threads out: readers wait for a release that may be scattered in many calls.
    """
    for index in range(ids.shape[0]):
        row = _U64(ids[index])
        for word in range(_U64(rows.shape[1])):
            table[row, first + word] = rows[index, word]
