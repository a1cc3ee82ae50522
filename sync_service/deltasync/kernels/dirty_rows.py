"""Sets of rows as columns sorted by id. All ids are strictly ascending."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import kernel, readable, writable

Ids = NDArray[np.int64]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Mask = NDArray[np.bool_]

# What is to be known of a row beside its norm.
NEVER_SENT, DELETED, _NONE = np.uint8(1), np.uint8(2), np.uint8(0)


@kernel(types.void(readable(types.int64, 1), readable(types.int64, 1), writable(types.boolean, 1)))
def members(ids: Ids, others: Ids, found: Mask) -> None:
    """Set `found` [n] where one of the `ids` [n] is among the others [m]."""
    at, end = 0, others.shape[0]
    for index in range(ids.shape[0]):
        while at < end and others[at] < ids[index]:
            at += 1
        found[index] = at < end and others[at] == ids[index]


@kernel(
    types.void(
        *(readable(each, 1) for each in (types.int64, types.boolean, types.int64, types.int64)),
        *(writable(each, 1) for each in (types.boolean, types.uint8)),
    )
)
def judge(
    slots: Numbers, differs: Mask, source_stamps: Numbers, held_stamps: Numbers, dirty: Mask, flags: Flags
) -> None:
    """Which rows are dirty. Stamps of deleted rows are negative.

    Args:
        slots: [n] where the rows are.
        differs: [n] whether the values of each differ from what replicas hold.
        source_stamps: [N] of the rows, by slot.
        held_stamps: [N] of what replicas hold of them, 0 = they were sent nothing.
        dirty: [n] is set.
        flags: [n] is set, to `NEVER_SENT` and `DELETED`.
    """
    for index in range(slots.shape[0]):
        row = slots[index]
        never, told, gone = held_stamps[row] == 0, held_stamps[row] < 0, source_stamps[row] < 0
        # A deleted row differs from zeros, except to replicas that never had it.
        dirty[index] = (not told and not never) if gone else (differs[index] or told)
        flags[index] = (NEVER_SENT if never else _NONE) | (DELETED if gone else _NONE)


_COLUMNS = types.int64, types.float64, types.int64, types.uint8


@kernel(
    types.tuple_of(types.int64, types.int64, types.int64)(
        *(readable(each, 1) for each in _COLUMNS),
        *(readable(each, 1) for each in (types.int64, types.int64, types.float64, types.uint8, types.boolean)),
        types.int64,
        readable(types.int64, 1),
        *(writable(each, 1) for each in (*_COLUMNS, types.int64, types.int64)),
    )
)
def merge(
    ids: Ids,
    norms: Floats,
    since: Numbers,
    flags: Flags,
    seen: Ids,
    seen_slots: Numbers,
    seen_norms: Floats,
    seen_flags: Flags,
    dirty: Mask,
    number: int,
    held_stamps: Numbers,
    to_ids: Ids,
    to_norms: Floats,
    to_since: Numbers,
    to_flags: Flags,
    marked: Numbers,
    cleaned: Numbers,
) -> tuple[int, int, int]:
    """Merge what was found of some rows ([m]) into a set of dirty rows ([n]).

    The columns `to_...` ([n + m]) are set to the new set. Rows that were found dirty have these norms and flags,
    and are in it since `number` unless they were before. The others are not in it. `marked` and `cleaned` ([m])
    are set to the stamps (`held_stamps`, [N]) of rows that have come into the set, and that have left it.

    Returns:
        How many rows the set has, how many have come, and how many have left.
    """
    row, to, came, left = 0, 0, 0, 0
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
        if dirty[index] and not known:
            marked[came] = held_stamps[seen_slots[index]]
            came += 1
        elif known and not dirty[index]:
            cleaned[left] = held_stamps[seen_slots[index]]
            left += 1
        if known:
            row += 1
    return to, came, left


@kernel(
    types.int64(
        *(readable(each, 1) for each in (*_COLUMNS, types.int64)), *(writable(each, 1) for each in _COLUMNS)
    )
)
def remove(
    ids: Ids,
    norms: Floats,
    since: Numbers,
    flags: Flags,
    others: Ids,
    to_ids: Ids,
    to_norms: Floats,
    to_since: Numbers,
    to_flags: Flags,
) -> int:
    """Set the columns of a set ([n]) to those of another ([n]) without some rows ([m]), which it may have or not.
    Returns how many rows are left.
    """
    at, to = 0, 0
    for row in range(ids.shape[0]):
        while at < others.shape[0] and others[at] < ids[row]:
            at += 1
        if at == others.shape[0] or others[at] != ids[row]:
            to_ids[to], to_norms[to], to_since[to], to_flags[to] = ids[row], norms[row], since[row], flags[row]
            to += 1
    return to
