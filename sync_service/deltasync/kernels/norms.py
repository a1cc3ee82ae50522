"""Squared norms of rows, and sums of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.callees import inlined
from deltasync.kernels.compiled import kernel, readable, writable

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
