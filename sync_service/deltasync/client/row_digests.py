"""Stand-in for `core.digests` until that has digests of rows."""

import numpy as np
from numpy.typing import NDArray

from deltasync.core.digests import _odd
from deltasync.core.rows import Values
from deltasync.kernels.digests import checksum, digest_rows

Digests = NDArray[np.uint64]


def row_digests(values: Values, col_offset: int = 0) -> Digests:
    """The digests [n] of rows [n, cols]."""
    words = np.ascontiguousarray(values)
    words = words.view(f"<u{min(values.itemsize, 4)}")
    first = col_offset * values.itemsize // words.itemsize
    weights = _odd(np.arange(first, first + words.shape[1], dtype=np.uint64), 1)
    digests = np.empty(len(words), np.uint64)
    digest_rows(words, weights, digests)
    return digests


def checksum_of(ids: NDArray[np.int64], rows: Values) -> int:
    """What rows add to the checksum of their table."""
    return int(checksum(np.asarray(ids, np.int64), row_digests(rows)))
