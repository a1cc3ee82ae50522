"""Digests and squared norms of rows, compiled."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    float32,
    float64,
    inlined,
    int64,
    kernel,
    readable,
    uint8,
    uint16,
    uint32,
    uint64,
    void,
    writable,
)

Digests = NDArray[np.uint64]

_U64 = np.uint64
# Types of words, by width.
WORDS = (uint8, uint16, uint32)


@inlined
def mixed(number):  # type: ignore[no-untyped-def]
    """The finalizer of SplitMix64: a bijection of 64-bit numbers."""
    z = number * _U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


@inlined
def share(row, digest):  # type: ignore[no-untyped-def]
    """The share of a row in the checksum of its table: 0 if its digest is 0."""
    return mixed(digest + mixed(_U64(row))) if digest else _U64(0)


@kernel(void(readable(uint64, 1), writable(uint64, 1)))
def mix(numbers: Digests, out: Digests) -> None:
    """Set `out` [n] to the finalizer of `numbers` [n]."""
    for index in range(numbers.shape[0]):
        out[index] = mixed(numbers[index])


@kernel(*(void(readable(word), readable(uint64, 1), writable(uint64, 1)) for word in WORDS))
def digest_rows(words: NDArray[np.unsignedinteger], weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to the sums of the words [n, w] of each row times the weights [w], modulo 2**64."""
    for row in range(words.shape[0]):
        total = _U64(0)
        for column in range(words.shape[1]):
            total += _U64(words[row, column]) * weights[column]
        digests[row] = total


@kernel(uint64(readable(int64, 1), readable(uint64, 1)))
def checksum(ids: NDArray[np.int64], digests: Digests) -> np.uint64:
    """The checksum of a table with the rows `ids` [n] of these digests [n], and zeros otherwise."""
    total = _U64(0)
    for index in range(ids.shape[0]):
        total += share(ids[index], digests[index])
    return total


@kernel(uint64(writable(uint64, 1), readable(int64, 1), readable(uint64, 1)))
def exchange(held: Digests, ids: NDArray[np.int64], digests: Digests) -> np.uint64:
    """Replace the digests of the rows `ids` [n] in `held` [rows] by others [n]. Return the change of the table's
    checksum.
    """
    change = _U64(0)
    for index in range(ids.shape[0]):
        row = ids[index]
        change += share(row, digests[index]) - share(row, held[row])
        held[row] = digests[index]
    return change


_LARGEST = np.float32(np.finfo(np.float32).max)
# The largest number that is squared as it is: the squares of 2**40 rows of 2**16 such numbers have a finite sum.
_MOST = np.float64(1e140)


@kernel(
    *(void(readable(each), writable(float32, 1)) for each in (float32, float64)),
    any_order=True,
)
def squared_norms(rows: NDArray[Any], squares: NDArray[np.float32]) -> None:
    """Set `squares` [n] to the squared L2 norms of rows [n, D], at most the largest fp32."""
    for row in range(rows.shape[0]):
        total = np.float64(0)
        for column in range(rows.shape[1]):
            value = np.float64(rows[row, column])
            total += value * value
        # The comparison is also false for NaN.
        squares[row] = np.float32(total) if total <= np.float64(_LARGEST) else _LARGEST


@inlined
def square(value):  # type: ignore[no-untyped-def]
    """The square of a number in sums of squares: always the same result, so that it can be subtracted again."""
    size = abs(np.float64(value))
    size = size if size <= _MOST else _MOST  # The comparison is also false for NaN.
    return size * size


@kernel(*(float64(readable(each)) for each in (float32, float64)), any_order=True)
def sum_of_squares(rows: NDArray[Any]) -> float:
    """The sum of the squares of all numbers of rows [n, D]."""
    total = np.float64(0)
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            total += square(rows[row, column])
    return total
