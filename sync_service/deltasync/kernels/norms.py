"""Squared norms of rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import kernel, readable, writable

# Squares of it add up to a finite number.
_LARGEST = np.float32(np.finfo(np.float32).max)


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
