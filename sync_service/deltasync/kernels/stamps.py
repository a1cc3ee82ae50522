"""Find and count rows that changed after a number, by their stamps.

A stamp is the number with which a row last changed, negative if that deleted the row; 0 = it never changed.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import inlined, int64, kernel, readable, void, writable

Int64s = NDArray[np.int64]

# Rows in a block. Ten thousand rows anywhere in 50 M are in 5 % of such blocks, and in 56 % of blocks of 4,096.
BLOCK_SHIFT = 8
BLOCK_ROWS = 1 << BLOCK_SHIFT
# Number of rows checked together, which is fast, before they are checked one by one.
_TOGETHER = 32
# Groups of 1, 64 and 4,096 numbers, as powers of two. The newest 64 groups of each size are counted.
GROUP_SHIFTS = (0, 6, 12)
GROUPS = 64

_READ, _WRITTEN = readable(int64, 1), writable(int64, 1)


@kernel(void(_READ, _WRITTEN))
def largest_of_blocks(stamps: Int64s, largest: Int64s) -> None:
    """Set `largest` [blocks] to the largest number in each block of `stamps` [rows]."""
    for block in range(largest.shape[0]):
        some = stamps[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]  # Faster than indexing the whole array.
        most = np.int64(0)
        for row in range(some.shape[0]):
            most = max(most, abs(some[row]))
        largest[block] = most


@kernel(void(_READ, int64, _WRITTEN))
def raise_blocks(ids: Int64s, number: int, largest: Int64s) -> None:
    """Raise the largest number to at least `number` in the blocks of the rows `ids` [n]."""
    for index in range(ids.shape[0]):
        block = ids[index] >> BLOCK_SHIFT
        largest[block] = max(largest[block], number)


@kernel(void(_READ, _READ, _WRITTEN))
def raise_blocks_to_each(ids: Int64s, stamps: Int64s, largest: Int64s) -> None:
    """Do the same as `raise_blocks` with a stamp [n] for each row."""
    for index in range(ids.shape[0]):
        block = ids[index] >> BLOCK_SHIFT
        largest[block] = max(largest[block], abs(stamps[index]))


@kernel(int64(_READ, int64))
def rows_in_newer_blocks(largest: Int64s, number: int) -> int:
    """The number of rows in blocks whose largest number is above `number`, assuming full blocks."""
    blocks = 0
    for block in range(largest.shape[0]):
        blocks += largest[block] > number
    return blocks * BLOCK_ROWS


@inlined
def _any_after(stamps, number):  # type: ignore[no-untyped-def]
    count = 0
    for index in range(stamps.shape[0]):
        count += abs(stamps[index]) > number
    return count > 0


@kernel(int64(_READ, _READ, int64, _WRITTEN))
def rows_after(stamps: Int64s, largest: Int64s, number: int, ids: Int64s) -> int:
    """Write the ids of all rows with a number above `number` to the start of `ids`, ascending; return how many.

    `largest` [blocks] are upper bounds of the numbers in each block. `ids` has room for `rows_in_newer_blocks`.
    """
    count = 0
    for block in range(largest.shape[0]):
        if largest[block] > number:
            of_block = stamps[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            for start in range(0, of_block.shape[0], _TOGETHER):
                some = of_block[start : start + _TOGETHER]
                if _any_after(some, number):
                    first = block * BLOCK_ROWS + start
                    for index in range(some.shape[0]):
                        ids[count] = first + index  # No branch, because the processor could not predict it.
                        count += abs(some[index]) > number
    return count


@kernel(int64(_READ, _READ, int64, _WRITTEN))
def rows_of_after(ids: Int64s, stamps: Int64s, number: int, found: Int64s) -> int:
    """Write those of `ids` [n, ascending] whose number in `stamps` [rows] is above `number` to the start of
    `found` [n], each once. Return their number.
    """
    count = 0
    last = np.int64(-1)
    for index in range(ids.shape[0]):
        row = ids[index]
        found[count] = row
        count += (row != last) & (abs(stamps[row]) > number)
        last = row
    return count


@kernel(void(_READ, int64, writable(int64, 2)))
def count_groups(stamps: Int64s, newest: int, counts: Int64s) -> None:
    """Add to `counts` [3, 65] the number of `stamps` [n] in the newest group, the one before it, and so on, for
    each size of group. The last column counts those older than 64 groups. No stamp may be above `newest`.
    """
    for index in range(stamps.shape[0]):
        number = abs(stamps[index])
        for level in range(len(GROUP_SHIFTS)):
            shift = GROUP_SHIFTS[level]
            age = (newest >> shift) - (number >> shift)
            counts[level, max(0, min(age, GROUPS))] += 1
