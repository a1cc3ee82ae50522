"""Sets of rows as columns sorted by id: who is in them, and what they become. All ids are strictly ascending."""

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
    types.tuple_of(types.int64, types.int64)(
        *(readable(each, 1) for each in (types.int64, types.boolean, *(types.int64,) * 4)),
        *(writable(each, 1) for each in (types.boolean, types.uint8, types.int64, types.int64)),
    )
)
def judge(
    ids: Ids,
    differs: Mask,
    source_stamps: Numbers,
    held_stamps: Numbers,
    sent_stamps: Numbers,
    marks: Numbers,
    dirty: Mask,
    flags: Flags,
    marked: Numbers,
    cleaned: Numbers,
) -> tuple[int, int]:
    """Which rows are dirty, of those that differ from what is held or do not. Stamps of deleted rows are negative.

    Args:
        ids: [n] the rows.
        differs: [n] whether the values of each differ.
        source_stamps: [N] of the rows.
        held_stamps: [N] of what is held of them.
        sent_stamps: [N] of what was sent of them, 0 = nothing.
        marks: [N] more than 0 for those that were dirty before.
        dirty: [n] is set.
        flags: [n] is set, to `NEVER_SENT` and `DELETED`.
        marked: [n] is set to when rows were last sent that are dirty now and were not before.
        cleaned: [n] is set to when rows were last sent that are not dirty now and were before.

    Returns:
        How many are marked, and how many cleaned.
    """
    first, second = 0, 0
    for index in range(ids.shape[0]):
        row = ids[index]
        sent = abs(sent_stamps[row])
        gone, told = source_stamps[row] < 0, held_stamps[row] < 0
        # That a row is no more differs from zeros, but not to who never had it.
        dirty[index] = (not told and sent != 0) if gone else (differs[index] or told)
        flags[index] = (NEVER_SENT if sent == 0 else _NONE) | (DELETED if gone else _NONE)
        if dirty[index] and marks[row] == 0:
            marked[first] = sent
            first += 1
        elif not dirty[index] and marks[row] != 0:
            cleaned[second] = sent
            second += 1
    return first, second


@kernel(types.void(writable(types.int64, 1), readable(types.int64, 1), readable(types.boolean, 1), types.int64))
def mark(marks: Numbers, ids: Ids, dirty: Mask, version: int) -> None:
    """Mark the rows `ids` [n] that are dirty with a version, in `marks` [N], unless they are marked; the others as
    clean.
    """
    for index in range(ids.shape[0]):
        row = ids[index]
        if not dirty[index]:
            marks[row] = 0
        elif marks[row] == 0:
            marks[row] = version


_COLUMNS = types.int64, types.float64, types.int64, types.uint8


@kernel(
    types.int64(
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
) -> int:
    """Set the columns of a set ([n + m]) to those of another ([n]) after a look at some rows ([m]), in the set or
    not: the dirty ones are in it, now with these norms and flags, and since `number` if they were not; others are
    not. Returns how many rows it has.
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
    return to


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
