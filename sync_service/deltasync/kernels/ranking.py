"""Which rows are the largest, without sorting them: a histogram of the topmost bits, then of the next, and on."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from deltasync.kernels.compiled import kernel, readable, writable

Floats = NDArray[np.float64]
Ranks = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_U64 = np.uint64
_FIRST = _U64(1 << 63)
_BITS = 11  # Of a histogram: it stays in the processor's cache, and two of them are what makes norms differ.
_BINS = 1 << _BITS
_NEVER = (1 << 63) - 1


@kernel(types.void(readable(types.uint64, 1), readable(types.boolean, 1), writable(types.uint64, 1)))
def rank_rows(norm_bits: Ranks, never_sent: Mask, ranks: Ranks) -> None:
    """Set `ranks` [n] to numbers that order rows: first those that were never sent, then by norm. Norms are passed
    as their bits [n], which order as they do: none of them is negative or NaN.
    """
    for row in range(norm_bits.shape[0]):
        ranks[row] = norm_bits[row] | (_FIRST if never_sent[row] else _U64(0))


def take_largest(ranks: Ranks, sizes: Numbers, wanted: Mask, budget: int) -> Mask:
    """The first wanted rows: as many as fit the budget, in the order of their ranks, and equal ones in their own
    order. The first that does not fit ends it.

    Args:
        ranks: [n] uint64.
        sizes: [n] int64, of each row, more than 0; or [1], of all.
        wanted: [n] the rows to choose from.
        budget: the largest sum of sizes.

    Returns:
        [n] which rows are taken.
    """
    some, some_sizes, taken = np.empty_like(ranks), np.empty_like(sizes), np.empty_like(wanted)
    count, differing = _choose(ranks, sizes, wanted, some, some_sizes)
    last, left = _find_last(some, some_sizes, count, differing, budget)
    _take(ranks, sizes, wanted, last, left, taken)
    return taken


@kernel(
    types.Tuple((types.int64, types.uint64))(
        readable(types.uint64, 1),
        readable(types.int64, 1),
        readable(types.boolean, 1),
        writable(types.uint64, 1),
        writable(types.int64, 1),
    )
)
def _choose(ranks: Ranks, sizes: Numbers, wanted: Mask, some: Ranks, some_sizes: Numbers) -> tuple[int, np.uint64]:
    """Copy ranks and sizes [n] of the wanted rows; returns how many, and in which bits ranks differ."""
    count, differing, alike = 0, _U64(0), len(sizes) == 1
    if alike:
        some_sizes[0] = sizes[0]
    for row in range(ranks.shape[0]):
        # Without a branch, which no processor could foretell.
        some[count] = ranks[row]
        if not alike:
            some_sizes[count] = sizes[row]
        differing |= (ranks[row] ^ some[0]) if wanted[row] else _U64(0)
        count += wanted[row]
    return count, differing


@kernel(
    types.Tuple((types.uint64, types.int64))(
        writable(types.uint64, 1), writable(types.int64, 1), types.int64, types.uint64, types.int64
    )
)
def _find_last(
    ranks: Ranks, sizes: Numbers, count: int, differing: np.uint64, budget: int
) -> tuple[np.uint64, int | np.int64]:
    """The rank at which the budget ends, and how much of it is left for rows of this rank. The ranks and sizes of
    the `count` rows are overwritten: rows are dropped whose topmost bits are not those of this rank.
    """
    shift, alike = 0, len(sizes) == 1
    while differing:
        differing >>= _U64(1)
        shift += 1
    # Of bits in which they do not differ, a histogram says nothing.
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
    types.void(
        readable(types.uint64, 1),
        readable(types.int64, 1),
        readable(types.boolean, 1),
        types.uint64,
        types.int64,
        writable(types.boolean, 1),
    )
)
def _take(ranks: Ranks, sizes: Numbers, wanted: Mask, last: np.uint64, left: int | np.int64, taken: Mask) -> None:
    """Set `taken` [n] for the wanted rows of higher ranks than the last one, and those of the last one that fit
    what is left.
    """
    alike = len(sizes) == 1
    for row in range(ranks.shape[0]):
        taken[row] = wanted[row] & (ranks[row] > last)
        if wanted[row] & (ranks[row] == last):
            size = sizes[0 if alike else row]
            taken[row] = size <= left
            left = left - size if taken[row] else -1


@kernel(
    types.Tuple((types.int64, types.float64, types.float64, types.int64))(
        readable(types.float64, 1), readable(types.int64, 1), readable(types.boolean, 1)
    ),
    any_order=True,
)
def split_amounts(norms: NDArray[np.float64], since: Numbers, taken: Mask) -> tuple[int, float, float, int]:
    """Of rows with these norms [n], dirty since these versions [n], of which some are `taken` [n]: how many are,
    the sums of the squared norms of these and of the others, and the smallest version of the others, or 0.
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
