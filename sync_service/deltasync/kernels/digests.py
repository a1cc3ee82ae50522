"""Digests and squared norms of rows, compiled."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import inlined, kernel, readable, writable

Digests = NDArray[np.uint64]

_U64 = np.uint64
# The widths in which bits come.
WORDS = (types.uint8, types.uint16, types.uint32)


@inlined
def mixed(number):  # type: ignore[no-untyped-def]
    """The finalizer of SplitMix64: a bijection of 64-bit numbers."""
    z = number * _U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))


@inlined
def share(row, digest):  # type: ignore[no-untyped-def]
    """What a row adds to the checksum of its table: nothing if its digest is 0."""
    return mixed(digest + mixed(_U64(row))) if digest else _U64(0)


@kernel(types.void(readable(types.uint64, 1), writable(types.uint64, 1)))
def mix(numbers: Digests, out: Digests) -> None:
    """Set `out` [n] to what the finalizer makes of `numbers` [n]."""
    for index in range(numbers.shape[0]):
        out[index] = mixed(numbers[index])


@kernel(*(types.void(readable(word), readable(types.uint64, 1), writable(types.uint64, 1)) for word in WORDS))
def digest_rows(words: NDArray[np.unsignedinteger], weights: Digests, digests: Digests) -> None:
    """Set `digests` [n] to the sums of the words [n, w] of each row times the weights [w], modulo 2**64."""
    for row in range(words.shape[0]):
        total = _U64(0)
        for column in range(words.shape[1]):
            total += _U64(words[row, column]) * weights[column]
        digests[row] = total


@kernel(types.uint64(readable(types.int64, 1), readable(types.uint64, 1)))
def checksum(ids: NDArray[np.int64], digests: Digests) -> np.uint64:
    """The checksum of a table that holds the rows `ids` [n] with these digests [n], and zeros otherwise."""
    total = _U64(0)
    for index in range(ids.shape[0]):
        total += share(ids[index], digests[index])
    return total


@kernel(types.uint64(writable(types.uint64, 1), readable(types.int64, 1), readable(types.uint64, 1)))
def exchange(held: Digests, ids: NDArray[np.int64], digests: Digests) -> np.uint64:
    """Set the digests of the rows `ids` [n] of `held` [rows] to others [n]; returns by how much the table's
    checksum changes.
    """
    change = _U64(0)
    for index in range(ids.shape[0]):
        row = ids[index]
        change += share(row, digests[index]) - share(row, held[row])
        held[row] = digests[index]
    return change


# Squares of it add up to a finite number.
_LARGEST = np.float32(np.finfo(np.float32).max)
# The largest number of which squares are added: 2**40 rows of 2**16 of them have a finite sum.
_MOST = np.float64(1e140)


@kernel(
    *(types.void(readable(each), writable(types.float32, 1)) for each in (types.float32, types.float64)),
    any_order=True,
)
def squared_norms(rows: NDArray[Any], squares: NDArray[np.float32]) -> None:
    """Set `squares` [n] to the squared L2 norms of rows [n, D], as far as fp32 has them."""
    for row in range(rows.shape[0]):
        total = np.float64(0)
        for column in range(rows.shape[1]):
            value = np.float64(rows[row, column])
            total += value * value
        # Also where it is no number.
        squares[row] = np.float32(total) if total <= np.float64(_LARGEST) else _LARGEST


@inlined
def square(value):  # type: ignore[no-untyped-def]
    """The square of a number, as sums of squares have it: always the same, so that it can be taken out again."""
    size = abs(np.float64(value))
    size = size if size <= _MOST else _MOST  # Also where it is no number.
    return size * size


@kernel(*(types.float64(readable(each)) for each in (types.float32, types.float64)), any_order=True)
def sum_of_squares(rows: NDArray[Any]) -> float:
    """The sum of the squares of all numbers of rows [n, D]."""
    total = np.float64(0)
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            total += square(rows[row, column])
    return total
