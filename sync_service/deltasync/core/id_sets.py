"""Sets of row ids: [n], strictly ascending. NumPy's own functions take a microsecond for each id: these, some
nanoseconds.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Ids, Mask
from deltasync.kernels import dirty_rows

T = TypeVar("T", bound=np.generic)


def distinct(numbers: NDArray[T]) -> NDArray[T]:
    """The set of some whole numbers ([n], in any order)."""
    ordered = np.sort(numbers, kind="stable")  # Which merges what is sorted in parts.
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def members(ids: Ids, others: Ids) -> Mask:
    """Which of the `ids` [n] are among the others [m]."""
    found = np.empty(len(ids), np.bool_)
    dirty_rows.members(ids, others, found)
    return found


def contiguous(ids: Ids) -> slice | None:
    """The slice that strictly ascending `ids` cover, if they leave no gap."""
    if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return None
