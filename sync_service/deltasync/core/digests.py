"""Digests of rows and checksums of tables, which show that two sides have the same bits.

    digest of a row         sum over its words j of  c(j) * word(j)                        modulo 2**64
    checksum of a table     sum over its rows i of   mix(digest(i) + mix(i))               modulo 2**64

A word is a number's bits without sign; a number of 64 bits is two words, the lower half first. c(j) is odd and
made from j by mix, the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014). A digest is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast",
2014). It is the sum of the digests of blocks of columns, and different rows share one with a probability of about
2**-32. A row with digest 0 adds nothing, so a table that was never written has checksum 0.

The order of rows does not matter to a sum, and overwriting a row needs only its earlier digest. Overwriting some
of its columns subtracts the share of their old words from the digest.
"""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import digests as digest_kernels

RowDigests: TypeAlias = NDArray[np.uint64]
Squares: TypeAlias = NDArray[np.float32]

_HALVES = 2  # Words in a number of 64 bits.


def words_of(rows: NDArray[Any]) -> NDArray[Any]:
    """The words [n, w] of rows [n, D], as a view if the rows are contiguous."""
    rows = np.ascontiguousarray(rows)
    return rows.view(f"<u{min(rows.itemsize, 4)}")


def first_word(column: int, dtype: np.dtype[Any]) -> int:
    """The number of the first word of a column."""
    return column * _HALVES if dtype.itemsize == 8 else column


def row_digests(rows: NDArray[Any], col_offset: int = 0) -> RowDigests:
    """The digests [n] of rows [n, cols], which start at column `col_offset`."""
    words = words_of(rows)
    digests = np.empty(len(rows), np.uint64)
    digest_kernels.digest_rows(words, weights(first_word(col_offset, rows.dtype), words.shape[1]), digests)
    return digests


def checksum(ids: NDArray[np.int64], digests: RowDigests) -> int:
    """The share of rows `ids` [n] with these digests [n] in the checksum of their table."""
    return int(digest_kernels.checksum(ids, digests))


def checksum_of(ids: NDArray[np.int64], rows: NDArray[Any]) -> int:
    """The share of rows `ids` [n] with values `rows` [n, D] in the checksum of their table."""
    return checksum(ids, row_digests(rows))


def squared_norms(rows: NDArray[Any]) -> Squares:
    """The squared L2 norms [n] of rows [n, D] of floats, at most the largest fp32."""
    wide: NDArray[Any] = np.ascontiguousarray(rows, np.float64 if rows.itemsize == 8 else np.float32)
    squares = np.empty(len(rows), np.float32)
    digest_kernels.squared_norms(wide, squares)
    return squares


def sum_of_squares(rows: NDArray[Any]) -> float:
    """The sum of the squares of floats [n, D]."""
    wide: NDArray[Any] = np.ascontiguousarray(rows, np.float64 if rows.itemsize == 8 else np.float32)
    return float(digest_kernels.sum_of_squares(wide))


@lru_cache(256)  # Every cut has shards of the same few widths.
def weights(first: int, words: int) -> RowDigests:
    """The factors [words] of the words from number `first`."""
    numbers = np.arange(first, first + words, dtype=np.uint64) + np.uint64(1 << 60)
    factors = np.empty(words, np.uint64)
    digest_kernels.mix(numbers, factors)
    factors |= np.uint64(1)
    factors.flags.writeable = False
    return factors
