"""Which rows are the largest, without sorting them: a histogram of the topmost bits, then of the next, and so on.

Rows of several groups lie one after the other; the rows of a group are of one size. Norms are passed as their
bits, which as unsigned numbers order as the norms do: none of them is negative or NaN.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from deltasync.kernels.compiled import inlined, kernel, readable, writable

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

_U64 = np.uint64
_SIGN = _U64(1 << 63)
_BITS = 11  # Of a histogram: it stays in the processor's cache, and two of them are what makes norms differ.
_BINS = 1 << _BITS


@inlined
def rank(norm_bits, never_sent):  # type: ignore[no-untyped-def]
    """What orders rows: first those that were never sent, then by norm."""
    return norm_bits | _SIGN if never_sent else norm_bits


@kernel(
    types.void(
        readable(types.uint64, 1),
        readable(types.boolean, 1),
        readable(types.boolean, 1),
        readable(types.int64, 1),
        readable(types.int64, 1),
        types.int64,
        writable(types.boolean, 1),
    )
)
def take_largest(
    norm_bits: NDArray[np.uint64],
    never_sent: Mask,
    wanted: Mask,
    ends: Numbers,
    sizes: Numbers,
    budget: int,
    taken: Mask,
) -> None:
    """Set `taken` [n] where a row is among the first wanted ones: as many as fit the budget, in the order of their
    ranks, and equal ones in their own order. The first that does not fit ends it.

    Args:
        norm_bits: [n] the bits of norms.
        never_sent: [n] whether a row goes before all that were sent.
        wanted: [n] the rows to choose from.
        ends: [groups] where each group ends.
        sizes: [groups] the size of each of its rows, more than 0.
        budget: the largest sum of sizes.
        taken: [n] is set.
    """
    left = np.int64(budget)
    known, last = _U64(0), _U64(0)  # The topmost bits of the rank at which the budget ends, and which these are.
    sums = np.empty(_BINS, np.int64)
    shift = 64
    while shift > 0:
        bits = min(_BITS, shift)
        shift -= bits
        within = _U64((1 << bits) - 1)
        sums[:] = 0
        row = 0
        for group in range(ends.shape[0]):
            size = sizes[group]
            while row < ends[group]:
                if wanted[row]:
                    number = rank(norm_bits[row], never_sent[row])
                    if number & known == last:
                        sums[(number >> _U64(shift)) & within] += size
                row += 1
        bin_ = (1 << bits) - 1
        while bin_ > 0 and sums[bin_] <= left:
            left -= sums[bin_]
            bin_ -= 1
        known |= within << _U64(shift)
        last |= _U64(bin_) << _U64(shift)
    row = 0
    for group in range(ends.shape[0]):
        size = sizes[group]
        while row < ends[group]:
            number = rank(norm_bits[row], never_sent[row])
            fits = number > last
            if wanted[row] and number == last:
                fits = size <= left
                left = left - size if fits else np.int64(-1)
            taken[row] = wanted[row] and fits
            row += 1


@kernel(
    types.Tuple((types.int64, types.float64, types.float64, types.int64))(
        readable(types.float64, 1), readable(types.int64, 1), readable(types.boolean, 1)
    ),
    any_order=True,
)
def split_amounts(
    norms: NDArray[np.float64], since: Numbers, taken: Mask
) -> tuple[np.int64, float, float, np.int64]:
    """Of rows with these norms [n], dirty since these versions [n], of which some are `taken` [n]: how many are,
    the sums of the squared norms of these and of the others, and the smallest version of the others, or 0.
    """
    rows, of_taken, of_left = np.int64(0), 0.0, 0.0
    oldest = np.int64(0x7FFFFFFFFFFFFFFF)
    for row in range(norms.shape[0]):
        square = norms[row] * norms[row]
        if taken[row]:
            rows += 1
            of_taken += square
        else:
            of_left += square
            oldest = min(oldest, since[row])
    return rows, of_taken, of_left, oldest if rows < norms.shape[0] else np.int64(0)
