"""What kernels do, in NumPy: what they are compared with, bit by bit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def mixed(numbers: Array) -> Array:
    """The finalizer of SplitMix64."""
    z: Array = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def row_digests(rows: Array, col_offset: int = 0) -> Array:
    """The digests [n] of rows [n, cols], the columns from `col_offset` on."""
    halves = max(1, rows.itemsize // 4)
    words = np.ascontiguousarray(rows).view(f"<u{min(4, rows.itemsize)}").astype(np.uint64)
    numbers = np.arange(words.shape[1], dtype=np.uint64) + np.uint64(col_offset * halves)
    digests: Array = (words * (mixed(numbers + np.uint64(2**60)) | np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return digests


def checksum(ids: Array, digests: Array) -> int:
    """What the rows `ids` with these digests add to the checksum of their table."""
    shares = mixed(digests + mixed(ids.astype(np.uint64)))
    return int(shares[digests != 0].sum(dtype=np.uint64))
