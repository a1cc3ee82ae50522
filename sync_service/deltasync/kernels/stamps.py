"""Which rows have changed after a number, and how many: what is asked of stamps.

A stamp is the number with which a row last changed, or the negative of it; 0 = it never changed.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import inlined, kernel, readable, writable

Int64s = NDArray[np.int64]

# The rows of a block: ten thousand rows anywhere in 50 M are in 5 % of these, and in 56 % of blocks of 4,096.
BLOCK_SHIFT = 8
BLOCK_ROWS = 1 << BLOCK_SHIFT
# So many are looked at together, which is quick, before one by one.
_TOGETHER = 32
# Groups of 1, of 64 and of 4,096 numbers, as powers of two; of each size the newest 64 are counted.
GROUP_SHIFTS = (0, 6, 12)
GROUPS = 64

_READ, _WRITTEN = readable(types.int64, 1), writable(types.int64, 1)


@kernel(types.void(_READ, _WRITTEN))
def largest_of_blocks(stamps: Int64s, largest: Int64s) -> None:
    """Set `largest` [blocks] to the largest number in each block of `stamps` [rows]."""
    for block in range(largest.shape[0]):
        some = stamps[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]  # Faster than indices of the whole.
        found = np.int64(0)
        for row in range(some.shape[0]):
            found = max(found, abs(some[row]))
        largest[block] = found


@kernel(types.void(_READ, types.int64, _WRITTEN))
def raise_blocks(ids: Int64s, number: int, largest: Int64s) -> None:
    """Raise the largest number of the blocks of the rows `ids` [n] to `number`, where it is less."""
    for index in range(ids.shape[0]):
        block = ids[index] >> BLOCK_SHIFT
        largest[block] = max(largest[block], number)


@kernel(types.void(_READ, _READ, _WRITTEN))
def raise_blocks_to_each(ids: Int64s, stamps: Int64s, largest: Int64s) -> None:
    """The same, with a stamp [n] of each row of its own."""
    for index in range(ids.shape[0]):
        block = ids[index] >> BLOCK_SHIFT
        largest[block] = max(largest[block], abs(stamps[index]))


@kernel(types.int64(_READ, types.int64))
def rows_in_newer_blocks(largest: Int64s, number: int) -> int:
    """How many rows the blocks have together whose largest number is above `number`, if each is full."""
    blocks = 0
    for block in range(largest.shape[0]):
        blocks += largest[block] > number
    return blocks * BLOCK_ROWS


@inlined
def _any_after(stamps, number):  # type: ignore[no-untyped-def]
    found = 0
    for index in range(stamps.shape[0]):
        found += abs(stamps[index]) > number
    return found > 0


@kernel(types.int64(_READ, _READ, types.int64, _WRITTEN))
def rows_after(stamps: Int64s, largest: Int64s, number: int, ids: Int64s) -> int:
    """Write the ids of all rows with a number above `number` to the beginning of `ids`, ascending.

    Args:
        stamps: [rows]
        largest: [blocks] of each block of rows a number that none of its stamps is above.
        number: 0 or more.
        ids: [`rows_in_newer_blocks`, or more]

    Returns:
        How many there are.
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
                        ids[count] = first + index  # Without a branch, which no processor could foretell.
                        count += abs(some[index]) > number
    return count


@kernel(types.int64(_READ, _READ, types.int64, _WRITTEN))
def rows_of_after(ids: Int64s, stamps: Int64s, number: int, found: Int64s) -> int:
    """Write those of `ids` [n, ascending] whose number in `stamps` [rows] is above `number` to the beginning of
    `found` [n], each once; returns how many there are.
    """
    count = 0
    last = np.int64(-1)
    for index in range(ids.shape[0]):
        row = ids[index]
        found[count] = row
        count += (row != last) & (abs(stamps[row]) > number)
        last = row
    return count


@kernel(types.void(_READ, types.int64, writable(types.int64, 2)))
def count_groups(stamps: Int64s, newest: int, counts: Int64s) -> None:
    """Add to `counts` [3, 65] how many of `stamps` [n] are in the newest group, the one before it, and so on, for
    each size of group; the last column has those that are in none of the newest 64. No stamp is above `newest`.
    """
    for index in range(stamps.shape[0]):
        number = abs(stamps[index])
        for level in range(len(GROUP_SHIFTS)):
            shift = GROUP_SHIFTS[level]
            age = (newest >> shift) - (number >> shift)
            counts[level, max(0, min(age, GROUPS))] += 1
