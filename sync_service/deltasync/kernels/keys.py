"""A hash table from 64-bit keys to places.

Open addressing: a slot is a key and beside it its place, or what it holds instead of one. Slots are a power of
two, and looked at in steps of 1, 2, 3 and so on, which reach all of them; some are empty, where every search ends.

Nothing here lets other Python threads run: lookups are short, and readers wait while keys are changed.
"""

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels import types
from deltasync.kernels.compiled import inlined, kernel, readable, writable

Slots = NDArray[np.int64]
Numbers = NDArray[np.int64]

# What a slot holds instead of a place.
EMPTY, ERASED = -1, -2

_U64 = np.uint64
_NUMBERS = readable(types.int64, 1)


@inlined
def first_slot(slots, key):  # type: ignore[no-untyped-def]
    """The slot at which the search for a key begins."""
    mixed = _U64(key)
    mixed = (mixed ^ (mixed >> _U64(32))) * _U64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> _U64(32))) * _U64(0xD6E8FEB86659FD93)
    return (mixed >> _U64(32)) & _U64(slots.shape[0] - 1)


@inlined
def slot_of(slots, key):  # type: ignore[no-untyped-def]
    """The slot of a key, or where it can be put: the first that was erased on the way, or an empty one."""
    slot, look = first_slot(slots, key), _U64(0)
    free, found = slot, False
    while slots[slot, 1] != EMPTY and (slots[slot, 0] != key or slots[slot, 1] == ERASED):
        if slots[slot, 1] == ERASED and not found:
            free, found = slot, True
        look += _U64(1)
        slot = (slot + look) & _U64(slots.shape[0] - 1)
    return free if found and slots[slot, 1] == EMPTY else slot


@kernel(types.void(readable(types.int64), _NUMBERS, writable(types.int64, 1)), nogil=False)
def find(slots: Slots, keys: Numbers, places: Numbers) -> None:
    """Set `places` [n] to those of the keys [n], -1 where they are not there."""
    for index in range(keys.shape[0]):
        place = slots[slot_of(slots, keys[index]), 1]
        places[index] = place if place >= 0 else -1


@kernel(types.tuple_of(types.int64, types.int64)(writable(types.int64), _NUMBERS, _NUMBERS), nogil=False)
def put(slots: Slots, keys: Numbers, places: Numbers) -> tuple[int, int]:
    """Give keys [n] their places [n], for which there is room.

    Returns:
        How many keys there are more, and how many empty slots less.
    """
    added = taken = 0
    for index in range(keys.shape[0]):
        slot = slot_of(slots, keys[index])
        added += slots[slot, 1] < 0
        taken += slots[slot, 1] == EMPTY
        slots[slot, 0] = keys[index]
        slots[slot, 1] = places[index]
    return added, taken


@kernel(types.int64(writable(types.int64), _NUMBERS), nogil=False)
def remove(slots: Slots, keys: Numbers) -> int:
    """Forget those of the keys [n] that are there; returns how many were."""
    removed = 0
    for index in range(keys.shape[0]):
        slot = slot_of(slots, keys[index])
        if slots[slot, 1] >= 0:
            slots[slot, 1] = ERASED
            removed += 1
    return removed
