"""Digests of rows: what shows that two tables hold the same bits, kept at the cost of the rows that change.

Both parts are sums over rows: the order in which rows came does not matter, and a row that is overwritten is
subtracted as it was and added as it is. Zeros add nothing: a table that was never written has an empty digest.

    checksum     sum over rows i and columns j of  w(i) * c(j) * bits(i, j)   modulo 2**64
    square_sum   sum over rows of their squared L2 norm, as fp32 has it

w and c are odd numbers made of row id and column by the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). This is multilinear hashing (Lemire and Kaser, "Strongly
universal string hashing is fast", 2014): different tables agree with a chance of about 2**-32.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Ids, Values

# Rows are taken in blocks whose scratch memory fits the processor's cache.
BLOCK_ROWS = 4096

_LARGEST = np.float32(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Digest:
    """Sums over rows: `checksum` modulo 2**64, and `square_sum`, a float that no sum of rows makes NaN."""

    checksum: int = 0
    square_sum: float = 0.0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.checksum + other.checksum) % 2**64, self.square_sum + other.square_sum)

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest((self.checksum - other.checksum) % 2**64, self.square_sum - other.square_sum)


def digest(ids: Ids, values: Values, col_offset: int = 0) -> Digest:
    """The digest of the rows `ids` ([n]), of which `values` ([n, cols] of any type) are the columns from
    `col_offset` on.
    """
    weights = _odd(np.arange(col_offset, col_offset + values.shape[1], dtype=np.uint64), 1)
    total = Digest()
    for start in range(0, len(ids), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        total += _of_block(ids[block], np.ascontiguousarray(values[block]), weights)
    return total


def _of_block(ids: Ids, values: Values, weights: NDArray[np.uint64]) -> Digest:
    bits = values.view(f"<u{values.itemsize}").astype(np.uint64)
    rows = np.einsum("ij,j->i", bits, weights)
    checksum = int((rows * _odd(ids.astype(np.uint64), 2)).sum())
    return Digest(checksum, square_sum(values))


def square_sum(values: Values) -> float:
    """The sum of the squared L2 norms of rows [n, cols]."""
    with np.errstate(over="ignore", invalid="ignore"):
        exact = values.astype(np.float32, copy=False)
        # Each row by itself, in fp32: its number must not depend on the rows beside it.
        squares = np.fmin(np.vecdot(exact, exact), _LARGEST)
    return float(squares.sum(dtype=np.float64))


def _odd(numbers: NDArray[np.uint64], stream: int) -> NDArray[np.uint64]:
    mixed = (numbers + np.uint64(stream << 60)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
