"""Which blocks of rows were written, by bits: what of a table's arrays goes to their files.

`marks` [blocks] has a number for each block of rows, and in it a bit for each array.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.callees import external
from deltasync.kernels.compiled import kernel, readable, writable

Marks = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

# Files are written by whole pages: none has to be read first.
_PAGE = 4096
_LARGEST_WRITE = 1 << 30
# What is not marked is written too, where it takes less time than another write.
_GAP = 32 << 10

_READ, _WRITTEN = readable(types.uint8, 1), writable(types.uint8, 1)
_MARKS = readable(types.uint16, 1)
# As unistd.h has it. Its number is negative for an error, of which it is not known here what it was.
_pwrite = external("pwrite", types.int64(types.int32, types.uint64, types.uint64, types.int64))


@kernel(types.void(readable(types.int64, 1), types.int64, types.uint16, writable(types.uint16, 1)), nogil=False)
def touch(ids: Numbers, shift: int, bits: int, marks: Marks) -> None:
    """Set `bits` in the blocks, of 2**`shift` rows, of the rows `ids` [n]."""
    last = np.int64(-1)
    for index in range(ids.shape[0]):
        block = ids[index] >> shift
        if block != last:
            marks[block] |= bits
            last = block


@kernel(types.void(_READ, _MARKS, types.uint16, types.int64, _WRITTEN))
def copy(source: Bytes, marks: Marks, bit: int, block_bytes: int, target: Bytes) -> None:
    """Copy the blocks that have the bit to an array that is as long, or longer."""
    for block in range(marks.shape[0]):
        if marks[block] & bit:
            first = block * block_bytes
            for index in range(first, min(first + block_bytes, source.shape[0])):
                target[index] = source[index]


@kernel(types.int64(types.int32, types.int64, _READ, _MARKS, types.uint16, types.int64, types.int64))
def write(descriptor: int, offset: int, array: Bytes, marks: Marks, bit: int, block_bytes: int, start: int) -> int:
    """Write the blocks that have the bit to a file, and what lies in between where that is little.

    Args:
        descriptor: of the file.
        offset: where the array begins in it.
        array: [bytes]
        marks: [blocks]
        bit: one.
        block_bytes: bytes of a block in the array; the last one may be shorter.
        start: the byte of the array with which to begin.

    Returns:
        The first byte that could not be written, or else how many there are.
    """
    block, blocks, size = start // block_bytes, marks.shape[0], len(array)
    while block < blocks:
        if not marks[block] & bit:
            block += 1
            continue
        first = max(start, (offset + block * block_bytes) // _PAGE * _PAGE - offset)
        end = 0
        while block < blocks and (marks[block] & bit or block * block_bytes < end + _GAP):
            if marks[block] & bit:
                end = -(-(offset + (block + 1) * block_bytes) // _PAGE) * _PAGE - offset
            block += 1
        end = min(end, size)
        while first < end:
            written = _pwrite(
                descriptor, array.ctypes.data + first, min(end - first, _LARGEST_WRITE), offset + first
            )
            if written <= 0:
                return first
            first += written
    return size
