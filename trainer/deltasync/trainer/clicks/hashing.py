"""A 64-bit mix of integers, the same on every machine."""

import numpy as np
from numpy.typing import NDArray


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 output for each state in `values`: a bijection that spreads every bit."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_to(buckets: int, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a bucket in 0..buckets-1 for each row of the `columns`, [n] each; their order counts."""
    mixed = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        mixed = splitmix64(mixed ^ column.astype(np.uint64))
    return (mixed % np.uint64(buckets)).astype(np.int64)
