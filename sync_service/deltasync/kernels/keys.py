"""A hash table from 64-bit keys to places.

Open addressing: a slot has a key and its place, `EMPTY` or `ERASED`. The number of slots is a power of two. A
search goes in steps of 1, 2, 3 and so on, which reach every slot. Some slots are empty, where every search ends.

These kernels keep the GIL, because lookups are short and readers wait while keys are changed.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.compiled import inlined, int64, kernel, readable, tuple_of, void, writable

Slots = NDArray[np.int64]
Numbers = NDArray[np.int64]

# Values of a slot without a place.
EMPTY, ERASED = -1, -2

_U64 = np.uint64
_NUMBERS = readable(int64, 1)


@inlined
def first_slot(slots, key):  # type: ignore[no-untyped-def]
    """The slot at which to start searching for a key."""
    mixed = _U64(key)
    mixed = (mixed ^ (mixed >> _U64(32))) * _U64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> _U64(32))) * _U64(0xD6E8FEB86659FD93)
    return (mixed >> _U64(32)) & _U64(slots.shape[0] - 1)


@inlined
def slot_of(slots, key):  # type: ignore[no-untyped-def]
    """The slot of a key, or a slot for it: the first erased one on the way, or an empty one."""
    slot, look = first_slot(slots, key), _U64(0)
    free, found = slot, False
    while slots[slot, 1] != EMPTY and (slots[slot, 0] != key or slots[slot, 1] == ERASED):
        if slots[slot, 1] == ERASED and not found:
            free, found = slot, True
        look += _U64(1)
        slot = (slot + look) & _U64(slots.shape[0] - 1)
    return free if found and slots[slot, 1] == EMPTY else slot


@kernel(void(readable(int64), _NUMBERS, writable(int64, 1)), nogil=False)
def find(slots: Slots, keys: Numbers, places: Numbers) -> None:
    """Set `places` [n] to those of the keys [n], -1 if missing."""
    for index in range(keys.shape[0]):
        place = slots[slot_of(slots, keys[index]), 1]
        places[index] = place if place >= 0 else -1


@kernel(tuple_of(int64, int64)(writable(int64), _NUMBERS, _NUMBERS), nogil=False)
def put(slots: Slots, keys: Numbers, places: Numbers) -> tuple[int, int]:
    """Set the places [n] of keys [n], for which there must be room.

    Returns:
        The number of new keys, and the number of empty slots used.
    """
    added = taken = 0
    for index in range(keys.shape[0]):
        slot = slot_of(slots, keys[index])
        added += slots[slot, 1] < 0
        taken += slots[slot, 1] == EMPTY
        slots[slot, 0] = keys[index]
        slots[slot, 1] = places[index]
    return added, taken


@kernel(int64(writable(int64), _NUMBERS), nogil=False)
def remove(slots: Slots, keys: Numbers) -> int:
    """Remove the keys [n] that exist, and return their number."""
    removed = 0
    for index in range(keys.shape[0]):
        slot = slot_of(slots, keys[index])
        if slots[slot, 1] >= 0:
            slots[slot, 1] = ERASED
            removed += 1
    return removed
