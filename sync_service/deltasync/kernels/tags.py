"""Tags of rows: 16 bits made of the id, the stamp and the digest of each, which show whether one has changed.

A tag is a sum without carries, so that a single bit of a stamp or of a digest never changes unnoticed; of other
damage, one in 65,536 does.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.callees import inlined
from deltasync.kernels.compiled import kernel, readable, writable

Tags = NDArray[np.uint16]
Digests = NDArray[np.uint64]
Numbers = NDArray[np.int64]

_U64 = np.uint64
_FACTOR = _U64(
    0x9E3779B97F4A7C15
)  # 2**64 over the golden ratio: the products of rows near each other differ much.
_IDS, _STAMPS, _DIGESTS = readable(types.int64, 1), readable(types.int64, 1), readable(types.uint64)


@inlined
def tag(key, row, stamp, digest):  # type: ignore[no-untyped-def]
    """The tag of a row of the table that has this key; 0 for one that never changed."""
    if stamp == 0 and digest == 0:
        return np.uint16(0)
    bits = (key + _U64(row)) * _FACTOR ^ _U64(stamp) ^ digest
    bits ^= bits >> _U64(32)
    bits ^= bits >> _U64(16)
    return np.uint16(bits & _U64(0xFFFF))


@inlined
def _digest(digests, row):  # type: ignore[no-untyped-def]
    total = _U64(0)
    for segment in range(digests.shape[1]):
        total += digests[row, segment]
    return total


@kernel(types.void(types.uint64, _IDS, _STAMPS, _DIGESTS, writable(types.uint16, 1)))
def tags_of(key: int, ids: Numbers, stamps: Numbers, digests: Digests, tags: Tags) -> None:
    """Set `tags` [n] to those of the rows `ids` [n] with these stamps [n] and digests [n, segments]."""
    for index in range(ids.shape[0]):
        tags[index] = tag(key, ids[index], stamps[index], _digest(digests, index))


@kernel(
    types.int64(types.uint64, types.int64, _STAMPS, _DIGESTS, readable(types.uint16, 1), writable(types.int64, 1))
)
def wrong_tags(key: int, first: int, stamps: Numbers, digests: Digests, tags: Tags, found: Numbers) -> int:
    """Write the ids of rows that do not fit their tags to the beginning of `found` [n]; returns how many do not.

    The rows are those from `first` on, with these stamps [n], digests [n, segments] and tags [n].
    """
    count = 0
    for index in range(stamps.shape[0]):
        row = first + index
        found[count] = row
        count += tags[index] != tag(key, row, stamps[index], _digest(digests, index))
    return count
