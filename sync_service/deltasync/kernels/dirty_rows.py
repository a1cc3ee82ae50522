"""Sets of rows as columns sorted by id: who is in them, and what they become. All ids are strictly ascending."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from deltasync.kernels.compiled import kernel, readable, writable

Ids = NDArray[np.int64]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@kernel(types.void(readable(types.int64, 1), readable(types.int64, 1), writable(types.boolean, 1)))
def members(ids: Ids, others: Ids, found: Mask) -> None:
    """Set `found` [n] where one of the `ids` [n] is among the others [m]."""
    at, end = 0, others.shape[0]
    for index in range(ids.shape[0]):
        while at < end and others[at] < ids[index]:
            at += 1
        found[index] = at < end and others[at] == ids[index]


_COLUMNS = types.int64, types.float64, types.int64, types.uint8


@kernel(
    types.void(
        *(readable(each, 1) for each in _COLUMNS),
        *(readable(each, 1) for each in (types.int64, types.float64, types.uint8, types.boolean)),
        types.int64,
        *(writable(each, 1) for each in _COLUMNS),
    )
)
def merge(
    ids: Ids,
    norms: Floats,
    since: Numbers,
    flags: Flags,
    seen: Ids,
    seen_norms: Floats,
    seen_flags: Flags,
    dirty: Mask,
    number: int,
    to_ids: Ids,
    to_norms: Floats,
    to_since: Numbers,
    to_flags: Flags,
) -> None:
    """Set the columns [k] of a set to those of another ([n]) after a look at some rows ([m]), in the set or not:
    the dirty ones are in it, now with these norms and flags, and since `number` if they were not; others are not.
    """
    row, to = 0, 0
    for index in range(seen.shape[0] + 1):
        # All that is before the next row that was seen, or before the end.
        while row < ids.shape[0] and (index == seen.shape[0] or ids[row] < seen[index]):
            to_ids[to], to_norms[to], to_since[to], to_flags[to] = ids[row], norms[row], since[row], flags[row]
            row += 1
            to += 1
        if index == seen.shape[0]:
            break
        known = row < ids.shape[0] and ids[row] == seen[index]
        if dirty[index]:
            to_ids[to], to_norms[to], to_flags[to] = seen[index], seen_norms[index], seen_flags[index]
            to_since[to] = since[row] if known else number
            to += 1
        if known:
            row += 1
