"""What has changed since it was copied, found and copied again in one pass."""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import inlined, kernel, readable, writable

Ids = NDArray[np.int64]
Words = NDArray[np.unsignedinteger]

_U64 = np.uint64
_IDS = writable(types.int64, 1)
_BLOCK_WORDS = 1024

# Words are counted without a sign: a number that could be negative is looked at each time, and nothing vectorises.


@inlined
def _differ(words, others, first, end):  # type: ignore[no-untyped-def]
    """Without an exit in the middle, which would be slower."""
    differing = words[first] ^ others[first]
    for index in range(first, end):
        differing |= words[index] ^ others[index]
    return differing != 0


@kernel(
    *(
        types.int64(readable(word, 1), types.uint64, writable(word, 1), _IDS)
        for word in (types.uint8, types.uint16, types.uint32)
    )
)
def follow_rows(rows: Words, width: int, copy: Words, ids: Ids) -> int:
    """Make a copy of rows as they are now.

    Args:
        rows: the bits of rows [n * width], one after the other.
        width: words in a row, at least 1.
        copy: [n * width] as they were.
        ids: room for n: which of them differed, in their order.

    Returns:
        How many differed.
    """
    count = 0
    block = max(_U64(1), _U64(_BLOCK_WORDS) // width) * width
    for start in range(_U64(0), _U64(rows.shape[0]), block):
        end = min(start + block, _U64(rows.shape[0]))
        if not _differ(rows, copy, start, end):
            continue
        for first in range(start, end, width):
            if _differ(rows, copy, first, first + width):
                for word in range(first, first + width):
                    copy[word] = rows[word]
                ids[count] = first // width
                count += 1
    return count


@kernel(types.int64(readable(types.int64, 1), types.int64, types.int64, writable(types.int64, 1), _IDS))
def follow_numbers(numbers: Ids, flip: int, none: int, copy: Ids, ids: Ids) -> int:
    """Make `copy` [n] as `numbers` [n] with some bits of each flipped, and 0 where it is `none`.

    Args:
        numbers: as they are now.
        flip: the bits.
        none: which number stands for none; 0 where all stand for themselves.
        copy: as they were, flipped.
        ids: room for n: which of them differed, in their order.

    Returns:
        How many differed.
    """
    count = 0
    for start in range(_U64(0), _U64(numbers.shape[0]), _U64(_BLOCK_WORDS)):
        end = min(start + _U64(_BLOCK_WORDS), _U64(numbers.shape[0]))
        differing = np.int64(0)
        for index in range(start, end):
            differing |= (np.int64(0) if numbers[index] == none else numbers[index] ^ flip) ^ copy[index]
        if differing == 0:
            continue
        for index in range(start, end):
            number = np.int64(0) if numbers[index] == none else numbers[index] ^ flip
            if number != copy[index]:
                copy[index] = number
                ids[count] = index
                count += 1
    return count
