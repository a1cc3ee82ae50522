"""A hash table from 64-bit keys to places.

Open addressing: a slot has a key and its place, `EMPTY` or `ERASED`. The number of slots is a power of two. A
search goes in steps of 1, 2, 3 and so on, which reach every slot. Some slots are empty, where every search ends.

An index is one array [n + 1, 2]: n slots, and then the salt, 128 random bits. The salt is the key of SipHash-1-3
(Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012), which gives the slot where a search starts.
Nobody can choose keys that collide without knowing the salt.

These kernels keep the GIL, because lookups are short and readers wait while keys are changed.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import inlined, int64, kernel, readable, tuple_of, void, writable

Index = NDArray[np.int64]
Numbers = NDArray[np.int64]

# Values of a slot without a place.
EMPTY, ERASED = -1, -2

_U64 = np.uint64
_NUMBERS = readable(int64, 1)


@inlined
def rotated(word, bits):  # type: ignore[no-untyped-def]
    """A word of 64 bits, rotated to the left."""
    return (word << _U64(bits)) | (word >> _U64(64 - bits))


@inlined
def siphash(salt, key):  # type: ignore[no-untyped-def]
    """SipHash-1-3 of a key, as 8 little-endian bytes."""
    first, second = _U64(salt[0]), _U64(salt[1])
    v0, v1 = first ^ _U64(0x736F6D6570736575), second ^ _U64(0x646F72616E646F6D)
    v2, v3 = first ^ _U64(0x6C7967656E657261), second ^ _U64(0x7465646279746573)
    # The key, the length of the key in the highest byte, and three words to finish.
    for word in (_U64(key), _U64(8 << 56), _U64(0), _U64(0), _U64(0)):
        v3 = v3 ^ word
        v0, v2 = v0 + v1, v2 + v3
        v1, v3 = rotated(v1, 13) ^ v0, rotated(v3, 16) ^ v2
        v0, v2 = rotated(v0, 32) + v3, v2 + v1
        v3, v1 = rotated(v3, 21) ^ v0, rotated(v1, 17) ^ v2
        v2 = rotated(v2, 32)
        v0 = v0 ^ word
        if word == _U64(8 << 56):
            v2 = v2 ^ _U64(0xFF)
    return v0 ^ v1 ^ v2 ^ v3


@inlined
def slot_of(index, key, slot):  # type: ignore[no-untyped-def]
    """The slot of a key, or a slot for it: the first erased one from its first slot on, or an empty one."""
    last, look = _U64(index.shape[0] - 2), _U64(0)
    slot = _U64(slot)
    free, found = slot, False
    while index[slot, 1] != EMPTY and (index[slot, 0] != key or index[slot, 1] == ERASED):
        if index[slot, 1] == ERASED and not found:
            free, found = slot, True
        look += _U64(1)
        slot = (slot + look) & last
    return free if found and index[slot, 1] == EMPTY else slot


@kernel(void(readable(int64), _NUMBERS, writable(int64, 1)), nogil=False)
def first_slots(index: Index, keys: Numbers, slots: Numbers) -> None:
    """Set `slots` [n] to those at which searches for the keys [n] start.

    A kernel of its own, because then the waits for memory in the next one overlap.
    """
    last = _U64(index.shape[0] - 2)
    for number in range(keys.shape[0]):
        slots[number] = siphash(index[-1], keys[number]) & last


@kernel(void(readable(int64), _NUMBERS, writable(int64, 1)), nogil=False)
def find(index: Index, keys: Numbers, places: Numbers) -> None:
    """Set `places` [n], which are the keys' first slots, to the places of the keys [n], -1 if missing."""
    for number in range(keys.shape[0]):
        place = index[slot_of(index, keys[number], places[number]), 1]
        places[number] = place if place >= 0 else -1


@kernel(tuple_of(int64, int64)(writable(int64), _NUMBERS, _NUMBERS, _NUMBERS), nogil=False)
def put(index: Index, keys: Numbers, slots: Numbers, places: Numbers) -> tuple[int, int]:
    """Set the places [n] of keys [n], for which there must be room. Their searches start at `slots` [n].

    Returns:
        The number of new keys, and the number of empty slots used.
    """
    added = taken = 0
    for number in range(keys.shape[0]):
        slot = slot_of(index, keys[number], slots[number])
        added += index[slot, 1] < 0
        taken += index[slot, 1] == EMPTY
        index[slot, 0] = keys[number]
        index[slot, 1] = places[number]
    return added, taken


@kernel(int64(writable(int64), _NUMBERS, _NUMBERS), nogil=False)
def remove(index: Index, keys: Numbers, slots: Numbers) -> int:
    """Remove the keys [n] that exist, and return their number. Their searches start at `slots` [n]."""
    removed = 0
    for number in range(keys.shape[0]):
        slot = slot_of(index, keys[number], slots[number])
        if index[slot, 1] >= 0:
            index[slot, 1] = ERASED
            removed += 1
    return removed
