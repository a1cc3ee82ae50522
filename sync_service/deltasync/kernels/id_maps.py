"""Maps from raw ids to rows that are sorted by raw id, read as the raw id of each row."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import kernel, readable, writable

Numbers = NDArray[np.int64]

UNSOUND = -1
_FREE = np.iinfo(np.int64).max
_NUMBERS = readable(types.int64, 1)


@kernel(types.int64(_NUMBERS, _NUMBERS, types.int64, types.int64, types.int64, writable(types.int64, 1)))
def read_sorted(raw_ids: Numbers, rows: Numbers, row_offset: int, first: int, end: int, column: Numbers) -> int:
    """Write the raw id of each row, all bits but the sign flipped, into `column`.

    Args:
        raw_ids: [n], ascending; the largest number of all stands for none.
        rows: [n], the row of each, counted from that with the number `row_offset`.
        row_offset: see there.
        first: the first raw id of a range.
        end: its end.
        column: [rows], zeros.

    Returns:
        How many raw ids lie outside of the range; `UNSOUND` where one does not follow the one before, or has a row
        that is none or another one's: `column` is of no use then.
    """
    outside = taken = 0
    before = np.int64(0)
    for index in range(raw_ids.shape[0]):
        raw = raw_ids[index]
        if raw == _FREE:
            continue
        row = rows[index] - row_offset
        if (taken and raw <= before) or row < 0 or row >= column.shape[0] or column[row] != 0:
            return UNSOUND
        column[row] = raw ^ _FREE
        outside += (raw < first) | (raw >= end)
        taken += 1
        before = raw
    return outside
