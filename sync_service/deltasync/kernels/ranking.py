"""Find the largest rows without sorting, by histograms of the topmost bits, then of the next ones, and so on."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import boolean, float64, int64, kernel, readable, tuple_of, uint64, void, writable

Floats = NDArray[np.float64]
Ranks = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

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
    """Choose rows in the order of their ranks until the budget is used up; equal ranks keep their order. The first
    row that does not fit ends the choice.

    Args:
        ranks: [n] uint64.
        sizes: [n] int64, positive sizes of the rows; or [1] for all.
        wanted: [n] the rows to choose from.
        budget: maximum sum of sizes.

    Returns:
        [n] the chosen rows.
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
