"""Rows by 64-bit key, for bulk lookups."""

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.rows import Ids, Mask, Values
from deltasync.kernels import keys as key_kernels

# Makes an array of zeros of a shape and a type.
Allocate: TypeAlias = Callable[[tuple[int, int], Any], NDArray[Any]]

_FIRST_SLOTS = 16


class KeySlots:
    """A `KeyIndex` for lookups, in `array`: slots [n, 2] and the salt, see `kernels.keys`."""

    def __init__(self, array: key_kernels.Index) -> None:
        self.array = array

    @property
    def slots(self) -> NDArray[np.int64]:
        """Keys and places: [n, 2]."""
        return self.array[:-1]

    def __len__(self) -> int:
        return int(np.count_nonzero(self.slots[:, 1] >= 0))

    def find(self, keys: Ids) -> Ids:
        """The places of keys ([n], in any order): int64 [n], -1 for missing keys."""
        keys = np.ascontiguousarray(keys)
        places = self._first_slots(keys)
        key_kernels.find(self.array, keys, places)
        return places

    def _first_slots(self, keys: Ids) -> Ids:
        slots = np.empty(len(keys), np.int64)
        key_kernels.first_slots(self.array, keys, slots)
        return slots

    def items(self) -> tuple[Ids, Ids]:
        """All keys and their places: int64 [n] each, in no order."""
        used = self.slots[self.slots[:, 1] >= 0]
        return used[:, 0], used[:, 1]


class KeyIndex(KeySlots):
    """A hash map from int64 keys to places, which are whole numbers from 0.

    At most half of the slots are in use, including erased ones. Few keys then need more than two probes.
    """

    def __init__(self, allocate: Allocate = np.zeros, keys: int = 0) -> None:
        """Start empty, with room for `keys`. `allocate` makes its array, and later larger ones."""
        self._allocate = allocate
        self._keys = self._used = 0
        self._make_slots(keys)
        self._compile()

    @classmethod
    def of(cls, array: key_kernels.Index, allocate: Allocate) -> "KeyIndex":
        """An index over an array that another one filled."""
        index = cls.__new__(cls)
        index._allocate, index.array = allocate, array
        index._keys = int(np.count_nonzero(index.slots[:, 1] >= 0))
        index._used = int(np.count_nonzero(index.slots[:, 1] != key_kernels.EMPTY))
        index._compile()
        return index

    def _compile(self) -> None:
        for each in (key_kernels.first_slots, key_kernels.find, key_kernels.put, key_kernels.remove):
            each.compile()  # Now, so that no reader waits for the compiler.

    def __len__(self) -> int:
        return self._keys

    def put(self, keys: Ids, places: Ids) -> None:
        """Add or change the places [n] of keys [n]. If a key appears several times, the last one counts."""
        if not self._fits(len(keys)):
            items = self.items()
            self._make_slots(len(self) + len(keys))
            self.put(*items)
        keys, places = np.ascontiguousarray(keys), np.ascontiguousarray(places)
        added, used = key_kernels.put(self.array, keys, self._first_slots(keys), places)
        self._keys, self._used = self._keys + added, self._used + used

    def remove(self, keys: Ids) -> None:
        """Remove keys ([n]); missing keys are ignored."""
        keys = np.ascontiguousarray(keys)
        self._keys -= key_kernels.remove(self.array, keys, self._first_slots(keys))

    def with_room(self, keys: int, *, cleared: bool = False) -> "KeyIndex":
        """This index, or a larger copy if it lacks room for new keys.

        With `cleared`, the copy has no keys: call `clear` before you add the new ones.
        """
        if 2 * keys <= len(self.slots) if cleared else self._fits(keys):
            return self
        larger = KeyIndex(self._allocate, keys if cleared else len(self) + keys)
        if not cleared:
            larger.put(*self.items())
        return larger

    def clear(self) -> None:
        """Remove all keys."""
        self.slots[:, 1] = key_kernels.EMPTY
        self._keys = self._used = 0

    def _fits(self, keys: int) -> bool:
        return 2 * (self._used + keys) <= len(self.slots)

    def _make_slots(self, keys: int) -> None:
        """Start again without keys, and with enough slots that this number of keys fills at most a third."""
        self.array = self._allocate((max(_FIRST_SLOTS, 1 << (3 * keys).bit_length()) + 1, 2), np.int64)
        self.array[-1] = np.frombuffer(os.urandom(16), np.int64)
        self.clear()


class KeyedRows:
    """A read-only table of rows by key."""

    def __init__(self, places: "Places", rows: Values) -> None:
        """Look up rows in `rows` ([at least 1, dim]), at the places of their keys."""
        self._places, self._rows = places, rows

    def __len__(self) -> int:
        return len(self._places)

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        dim: int = self._rows.shape[1]
        return dim

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the values."""
        return self._rows.dtype

    def lookup(self, keys: Ids) -> tuple[Values, Mask]:
        """Look up the rows of keys.

        Args:
            keys: int64 [n], in any order, with or without duplicates.

        Returns:
            A copy of the rows, [n, dim], zeros for missing keys; and a mask of the existing keys, bool [n].

        Raises:
            InvalidInput: keys of another type or shape.
        """
        places = self._places.find(checked_keys(keys))
        exist = places >= 0
        values = self._rows.take(np.maximum(places, 0), axis=0)
        values[~exist] = 0
        return values, exist

    def keys(self) -> Ids:
        """All keys: int64 [n], ascending."""
        return np.sort(self._places.items()[0])


class Places(Protocol):
    """A map from keys to the places of their rows."""

    def find(self, keys: Ids) -> Ids:
        """The places of keys ([n]): int64 [n], -1 for missing keys."""

    def items(self) -> tuple[Ids, Ids]:
        """All keys and their places: int64 [n] each, in no order."""

    def __len__(self) -> int:
        """The number of keys."""


class RowNumbers:
    """A `Places` whose keys are row numbers. `there` is a mask of the existing rows."""

    def __init__(self, there: Mask) -> None:
        self._there = there

    def __len__(self) -> int:
        return int(np.count_nonzero(self._there))

    def find(self, keys: Ids) -> Ids:
        """See `Places`."""
        inside = (keys >= 0) & (keys < len(self._there))
        at = np.where(inside, keys, 0)
        return np.where(inside & self._there[at], at, -1)

    def items(self) -> tuple[Ids, Ids]:
        """See `Places`."""
        rows = np.flatnonzero(self._there)
        return rows, rows


def checked_keys(keys: Ids) -> Ids:
    """Keys of type int64 [n], else an InvalidInput."""
    if not isinstance(keys, np.ndarray):
        raise InvalidInput(f"keys: a {type(keys).__name__}, expected a NumPy array, int64 [n]")
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise InvalidInput(f"keys of shape {list(keys.shape)} and type {keys.dtype}: expected int64 [n]")
    return keys
