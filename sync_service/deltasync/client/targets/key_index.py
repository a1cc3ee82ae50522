"""From 64-bit keys to places: a hash table that is asked and changed in bulk."""

import numpy as np

from deltasync.core.rows import Ids
from deltasync.kernels import keys as key_kernels

_SMALLEST = 16  # Slots.


class KeyIndex:
    """The place of each key: whole numbers from 0 on by int64 keys of any value.

    At most half of the slots are in use, those of erased keys included, so that few keys need more than two looks.
    """

    def __init__(self) -> None:
        self._keys = self._used = 0
        self._clear(_SMALLEST)
        for each in (key_kernels.find, key_kernels.put, key_kernels.remove):
            each.compile()  # Not inside of readers, nor in front of those that wait.

    def __len__(self) -> int:
        """The number of keys."""
        return self._keys

    def find(self, keys: Ids) -> Ids:
        """The places of some keys ([n], in any order): int64 [n], -1 for keys that are not there."""
        places = np.empty(len(keys), np.int64)
        key_kernels.find(self._slots, np.ascontiguousarray(keys), places)
        return places

    def put(self, keys: Ids, places: Ids) -> None:
        """Give some keys ([n]) their places ([n]), whether they are there or not; of several the last counts."""
        if not self._fits(len(keys)):
            self._fill(self.items(), len(keys))
        added, taken = key_kernels.put(self._slots, np.ascontiguousarray(keys), np.ascontiguousarray(places))
        self._keys, self._used = self._keys + added, self._used + taken

    def remove(self, keys: Ids) -> None:
        """Forget some keys ([n]); others than those that are there do no harm."""
        self._keys -= key_kernels.remove(self._slots, np.ascontiguousarray(keys))

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
        self.put(*held)

    def _clear(self, slots: int) -> None:
        self._slots = np.empty((slots, 2), np.int64)
        self._slots[:, 1] = key_kernels.EMPTY
        self._keys = self._used = 0
