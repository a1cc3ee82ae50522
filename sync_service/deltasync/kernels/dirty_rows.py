"""Sets of dirty rows as columns sorted by id, all ids strictly ascending; and the largest rows of a set.

The largest are found without sorting, by histograms of the topmost bits, then of the next ones, and so on.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import (
    boolean,
    float64,
    int64,
    kernel,
    readable,
    tuple_of,
    uint8,
    uint64,
    void,
    writable,
)

Ids = NDArray[np.int64]
Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Ranks = NDArray[np.uint64]
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
    """Set which rows are `dirty` [n], and their `flags` [n]. Stamps of deleted rows are negative; all are by slot.

    `differs` [n] says whether values differ from those of replicas. A stamp of 0 in `held_stamps`: never sent.
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
    `cleaned` ([m]) receive the stamps (`held_stamps`, [N]) of rows that enter and leave the set. Returns the
    numbers of rows in the set, of rows that entered, and of rows that left.
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


_U64 = np.uint64
_FIRST = _U64(1 << 63)
_BITS = 11  # Bits of a histogram, which fits the processor's cache; two histograms tell most norms apart.
_BINS = 1 << _BITS
_NEVER = (1 << 63) - 1


@kernel(void(readable(uint64, 1), readable(boolean, 1), writable(uint64, 1)))
def rank_rows(norm_bits: Ranks, never_sent: Mask, ranks: Ranks) -> None:
    """Set `ranks` [n] to numbers that order rows: rows never sent come first, then larger norms. `norm_bits` [n]
    are the bits of the norms, which have the same order because no norm is negative or NaN.
    """
    for row in range(norm_bits.shape[0]):
        ranks[row] = norm_bits[row] | (_FIRST if never_sent[row] else _U64(0))


def take_largest(ranks: Ranks, sizes: Numbers, wanted: Mask, budget: int) -> Mask:
    """Choose wanted rows [n] in the order of their ranks until the budget is used up.

    Equal ranks keep their order. The first row that does not fit ends the choice. `sizes` are [n], or [1] for all.
    """
    some, some_sizes, taken = np.empty_like(ranks), np.empty_like(sizes), np.empty_like(wanted)
    count, differing = _choose(ranks, sizes, wanted, some, some_sizes)
    last, left = _find_last(some, some_sizes, count, differing, budget)
    _take(ranks, sizes, wanted, last, left, taken)
    return taken


@kernel(
    tuple_of(int64, uint64)(
        readable(uint64, 1),
        readable(int64, 1),
        readable(boolean, 1),
        writable(uint64, 1),
        writable(int64, 1),
    )
)
def _choose(ranks: Ranks, sizes: Numbers, wanted: Mask, some: Ranks, some_sizes: Numbers) -> tuple[int, np.uint64]:
    """Copy ranks and sizes [n] of wanted rows. Return their number, and the bits in which ranks differ."""
    count, differing, alike = 0, _U64(0), len(sizes) == 1
    if alike:
        some_sizes[0] = sizes[0]
    for row in range(ranks.shape[0]):
        # No branch, because the processor could not predict it.
        some[count] = ranks[row]
        if not alike:
            some_sizes[count] = sizes[row]
        differing |= (ranks[row] ^ some[0]) if wanted[row] else _U64(0)
        count += wanted[row]
    return count, differing


@kernel(tuple_of(uint64, int64)(writable(uint64, 1), writable(int64, 1), int64, uint64, int64))
def _find_last(
    ranks: Ranks, sizes: Numbers, count: int, differing: np.uint64, budget: int
) -> tuple[np.uint64, int | np.int64]:
    """The rank at which the budget ends, and what is left of it for rows of this rank. Ranks and sizes of the
    `count` rows are overwritten: rows with other topmost bits are dropped.
    """
    shift, alike = 0, len(sizes) == 1
    while differing:
        differing >>= _U64(1)
        shift += 1
    # Histograms of bits in which ranks agree are useless.
    last, left = _U64(0), budget
    if count and shift < 64:
        last = (ranks[0] >> _U64(shift)) << _U64(shift)
    sums = np.empty(_BINS, np.int64)
    while shift > 0:
        bits = min(_BITS, shift)
        shift -= bits
        sums[:] = 0
        for row in range(count):
            sums[(ranks[row] >> _U64(shift)) & _U64((1 << bits) - 1)] += sizes[0 if alike else row]
        bin_ = (1 << bits) - 1
        while bin_ > 0 and sums[bin_] <= left:
            left -= sums[bin_]
            bin_ -= 1
        last |= _U64(bin_) << _U64(shift)
        every, count = count, 0
        for row in range(every):
            ranks[count] = ranks[row]
            if not alike:
                sizes[count] = sizes[row]
            count += ranks[row] >> _U64(shift) == last >> _U64(shift)
    return last, left


@kernel(
    void(
        readable(uint64, 1),
        readable(int64, 1),
        readable(boolean, 1),
        uint64,
        int64,
        writable(boolean, 1),
    )
)
def _take(ranks: Ranks, sizes: Numbers, wanted: Mask, last: np.uint64, left: int | np.int64, taken: Mask) -> None:
    """Set `taken` [n] for wanted rows of ranks above `last`, and for rows of that rank while they fit the budget
    that is left.
    """
    alike = len(sizes) == 1
    for row in range(ranks.shape[0]):
        taken[row] = wanted[row] & (ranks[row] > last)
        if wanted[row] & (ranks[row] == last):
            size = sizes[0 if alike else row]
            taken[row] = size <= left
            left = left - size if taken[row] else -1


@kernel(
    tuple_of(int64, float64, float64, int64)(readable(float64, 1), readable(int64, 1), readable(boolean, 1)),
    any_order=True,
)
def split_amounts(norms: NDArray[np.float64], since: Numbers, taken: Mask) -> tuple[int, float, float, int]:
    """Split rows with norms [n], dirty since versions [n], by `taken` [n]. Return the number of taken rows, the
    sums of squared norms of taken and other rows, and the oldest version of the others, or 0.
    """
    rows, of_taken, of_left = 0, 0.0, 0.0
    oldest = _NEVER
    for row in range(norms.shape[0]):
        square = norms[row] * norms[row]
        if taken[row]:
            rows += 1
            of_taken += square
        else:
            of_left += square
            oldest = min(oldest, since[row])
    return rows, of_taken, of_left, oldest if rows < norms.shape[0] else 0
