"""From 64-bit keys to places: a hash table that is asked and changed in bulk."""

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Ids, Mask

# What a slot holds instead of a place.
_EMPTY, _ERASED = -1, -2
_SMALLEST = 16  # Slots.
_BLOCK = 1 << 14  # Keys whose temporary arrays stay in the processor's cache.
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
_HALF = np.uint64(32)


class KeyIndex:
    """The place of each key: whole numbers from 0 on by int64 keys of any value.

    Open addressing: a slot holds a key beside its place, so that a lookup mostly touches memory once. At most half
    of the slots are in use, those of erased keys included, so that few keys need more than two looks.
    """

    def __init__(self) -> None:
        self._clear(_SMALLEST)

    def __len__(self) -> int:
        """The number of keys."""
        return self._keys

    def find(self, keys: Ids) -> Ids:
        """The places of some keys ([n], in any order): int64 [n], -1 for keys that are not there."""
        places = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            slots = self._slots_of(keys[block])
            places[block] = np.where(slots >= 0, self._slots[slots, 1], -1)
        return places

    def put(self, keys: Ids, places: Ids) -> None:
        """Give some distinct keys ([n]) their places ([n]), whether they are there or not."""
        slots = self._slots_of(keys)
        there = slots >= 0
        self._slots[slots[there], 1] = places[there]
        self._add(keys[~there], places[~there])

    def remove(self, keys: Ids) -> None:
        """Forget some distinct keys ([n]); others than those that are there do no harm."""
        slots = self._slots_of(keys)
        slots = slots[slots >= 0]
        self._slots[slots, 1] = _ERASED
        self._keys -= len(slots)

    def items(self) -> tuple[Ids, Ids]:
        """All keys and their places: int64 [n] each, in no order."""
        held = self._slots[self._slots[:, 1] >= 0]
        return held[:, 0], held[:, 1]

    def with_room(self, keys: int) -> "KeyIndex":
        """This index if so many more keys can be put at once, else one that holds the same and has the room."""
        if self._fits(keys):
            return self
        larger = KeyIndex()
        larger._fill(self.items(), keys)
        return larger

    def _fits(self, keys: int) -> bool:
        return 2 * (self._used + keys) <= len(self._slots)

    def _fill(self, held: tuple[Ids, Ids], more: int) -> None:
        """Begin anew with these keys, and slots enough that `more` of them fill a third at most."""
        self._clear(max(_SMALLEST, 1 << (3 * (len(held[0]) + more)).bit_length()))
        self._add(*held)

    def _clear(self, slots: int) -> None:
        self._slots = np.empty((slots, 2), np.int64)
        self._slots[:, 1] = _EMPTY
        self._shift = np.uint64(64 - (slots.bit_length() - 1))
        self._keys = self._used = 0

    def _add(self, keys: Ids, places: Ids) -> None:
        """Add distinct keys that are not there."""
        if not self._fits(len(keys)):
            self._fill(self.items(), len(keys))
        pairs, slots, look = np.stack([keys, places], axis=1), self._first_slots(keys), 0
        self._keys += len(keys)
        while len(pairs):
            taken = self._slots[slots, 1]
            free = taken < 0
            # Of several that want one slot the last gets it.
            self._slots[slots[free]] = pairs[free]
            won = free & (self._slots[slots, 0] == pairs[:, 0])
            self._used += int(np.count_nonzero(taken[won] == _EMPTY))
            look += 1
            pairs, slots = pairs[~won], self._next_slots(slots[~won], look)

    def _slots_of(self, keys: Ids) -> Ids:
        """The slot of each key, -1 of one that is not there."""
        slots, look = self._first_slots(keys), 0
        found, ended = self._look(slots, keys)
        result = np.where(found, slots, -1)
        left = np.flatnonzero(~(found | ended))
        slots, keys = slots[left], keys[left]
        while len(left):
            look += 1
            slots = self._next_slots(slots, look)
            found, ended = self._look(slots, keys)
            result[left[found]] = slots[found]
            on = ~(found | ended)
            left, slots, keys = left[on], slots[on], keys[on]
        return result

    def _look(self, slots: Ids, keys: Ids) -> tuple[Mask, Mask]:
        """In which slots the keys are, and in which the search for them ends without."""
        held = self._slots.take(slots, axis=0)
        return (held[:, 0] == keys) & (held[:, 1] >= 0), held[:, 1] == _EMPTY

    def _first_slots(self, keys: Ids) -> Ids:
        mixed: NDArray[np.uint64] = keys.view(np.uint64)
        mixed = (mixed ^ (mixed >> _HALF)) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> _HALF)) * _FACTORS[1]
        return (mixed >> self._shift).view(np.int64)

    def _next_slots(self, slots: Ids, look: int) -> Ids:
        # Steps of 1, 2, 3...: of a power of two of slots they reach all.
        return (slots + look) & (len(self._slots) - 1)
