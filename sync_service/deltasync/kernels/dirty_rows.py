"""Sets of rows as columns sorted by id. All ids are strictly ascending."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import boolean, float64, int64, kernel, readable, tuple_of, uint8, void, writable

Ids = NDArray[np.int64]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Mask = NDArray[np.bool_]

# Flags of a row.
NEVER_SENT, DELETED, _NONE = np.uint8(1), np.uint8(2), np.uint8(0)


@kernel(void(readable(int64, 1), readable(int64, 1), writable(boolean, 1)))
def members(ids: Ids, others: Ids, found: Mask) -> None:
    """Set `found` [n] to whether each of `ids` [n] is in `others` [m]."""
    at, end = 0, others.shape[0]
    for index in range(ids.shape[0]):
        while at < end and others[at] < ids[index]:
            at += 1
        found[index] = at < end and others[at] == ids[index]


@kernel(
    void(
        *(readable(each, 1) for each in (int64, boolean, int64, int64)),
        *(writable(each, 1) for each in (boolean, uint8)),
    )
)
def judge(
    slots: Numbers, differs: Mask, source_stamps: Numbers, held_stamps: Numbers, dirty: Mask, flags: Flags
) -> None:
    """Determine which rows are dirty. Stamps of deleted rows are negative.

    Args:
        slots: [n] slots of the rows.
        differs: [n] whether the values of each row differ from those of replicas.
        source_stamps: [N] stamps of the rows, by slot.
        held_stamps: [N] stamps of the rows of replicas, by slot; 0 = never sent.
        dirty: [n] result.
        flags: [n] result: `NEVER_SENT` and `DELETED`.
    """
    for index in range(slots.shape[0]):
        row = slots[index]
        never, told, gone = held_stamps[row] == 0, held_stamps[row] < 0, source_stamps[row] < 0
        # A deleted row counts as zeros, except for replicas that never had it.
        dirty[index] = (not told and not never) if gone else (differs[index] or told)
        flags[index] = (NEVER_SENT if never else _NONE) | (DELETED if gone else _NONE)


_COLUMNS = int64, float64, int64, uint8


@kernel(
    tuple_of(int64, int64, int64)(
        *(readable(each, 1) for each in _COLUMNS),
        *(readable(each, 1) for each in (int64, int64, float64, uint8, boolean)),
        int64,
        readable(int64, 1),
        *(writable(each, 1) for each in (*_COLUMNS, int64, int64)),
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
    """Merge the comparison of some rows ([m], `seen`) into a set of dirty rows ([n]).

    The columns `to_...` ([n + m]) receive the new set. Compared rows that are dirty enter or stay in it with new
    norms and flags; those that enter are dirty since `number`. Compared rows that are clean leave it. `marked` and
    `cleaned` ([m]) receive the stamps (`held_stamps`, [N]) of rows that enter and leave the set.

    Returns:
        The numbers of rows in the set, of rows that entered, and of rows that left.
    """
    row, to, came, left = 0, 0, 0, 0
    for index in range(seen.shape[0] + 1):
        # Copy the rows before the next compared row, or before the end.
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


@kernel(int64(*(readable(each, 1) for each in (*_COLUMNS, int64)), *(writable(each, 1) for each in _COLUMNS)))
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
    """Copy the columns of a set ([n]) without some rows ([m]), which it need not contain. Return the number of
    rows that are left.
    """
    at, to = 0, 0
    for row in range(ids.shape[0]):
        while at < others.shape[0] and others[at] < ids[row]:
            at += 1
        if at == others.shape[0] or others[at] != ids[row]:
            to_ids[to], to_norms[to], to_since[to], to_flags[to] = ids[row], norms[row], since[row], flags[row]
            to += 1
    return to
