"""Tables with 64-bit keys, for bulk lookups and changes."""

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.rows import Ids, Mask, Values, distinct
from deltasync.kernels import keys as key_kernels

# Makes an array of zeros of a shape and a type.
Allocate: TypeAlias = Callable[[tuple[int, int], Any], NDArray[Any]]

_FIRST_ROWS = 16
_FIRST_SLOTS = 16


class KeySlots:
    """A `KeyIndex` for lookups: a `Places`. Another process may fill it.

    Attributes:
        array: [n + 1, 2], the slots and the salt, see `kernels.keys`.
    """

    def __init__(self, array: key_kernels.Index) -> None:
        self.array = array

    @property
    def slots(self) -> NDArray[np.int64]:
        """Keys and places: [n, 2]."""
        return self.array[:-1]

    def __len__(self) -> int:
        """The number of keys, which it counts."""
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
    """A hash map from int64 keys to places, which are whole numbers from 0. Each has a random salt of its own.

    At most half of the slots are in use, including slots of erased keys. Few keys then need more than two probes.
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
        """The number of keys."""
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
        """This index if it has room for this number of new keys, else a larger copy.

        With `cleared`, leave out the present keys: call `clear` before you add the new ones.
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
        """The number of keys."""
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


class KeyedTable(KeyedRows):
    """A mutable table of rows by key.

    Several threads may look up rows at the same time. A change needs exclusive access.
    """

    def __init__(self, dim: int, dtype: np.dtype[np.generic] | type[np.generic] = np.float32) -> None:
        self._index = KeyIndex()
        super().__init__(self._index, np.zeros((_FIRST_ROWS, dim), dtype))
        self._unused = np.arange(_FIRST_ROWS)  # Places without a key.

    def update(self, keys: Ids, values: Values) -> Mask:
        """Overwrite the rows of existing keys.

        Args:
            keys: int64 [n]. If a key appears several times, the last one counts.
            values: [n, dim].

        Returns:
            A mask of the existing keys: bool [n].

        Raises:
            InvalidInput: keys or values of another type or shape; nothing was changed.
        """
        values = self._checked(keys, values)
        places = self._index.find(keys)
        exist = places >= 0
        self._rows[places[exist]] = values[exist]
        return exist

    def insert(self, keys: Ids, values: Values) -> None:
        """Overwrite the rows of existing keys and add missing keys; see `update`."""
        values = self._checked(keys, values)
        new = distinct(keys[self._index.find(keys) < 0])
        self._index.put(new, self._take(len(new)))
        self._rows[self._index.find(keys)] = values

    def erase(self, keys: Ids) -> Mask:
        """Remove keys (int64 [n]) and their rows; return a mask of the keys that existed: bool [n].

        Raises:
            InvalidInput: keys of another type or shape; nothing was changed.
        """
        places = self._index.find(checked_keys(keys))
        existed = places >= 0
        self._unused = np.concatenate([self._unused, distinct(places[existed])])
        self._index.remove(distinct(keys[existed]))
        return existed

    def _take(self, count: int) -> Ids:
        """Reserve `count` unused places."""
        if (lacking := count - len(self._unused)) > 0:
            rows = len(self._rows)
            more = max(rows, lacking)
            self._rows = np.concatenate([self._rows, np.zeros((more, self.dim), self.dtype)])
            self._unused = np.concatenate([self._unused, np.arange(rows, rows + more)])
        places, self._unused = self._unused[:count], self._unused[count:]
        return places

    def _checked(self, keys: Ids, values: Values) -> Values:
        checked_keys(keys)
        values = np.asarray(values)
        if values.shape != (len(keys), self.dim) or not np.can_cast(values.dtype, self.dtype, "same_kind"):
            raise InvalidInput(
                f"values of shape {list(values.shape)} and type {values.dtype}: expected {[len(keys), self.dim]} "
                f"and {self.dtype}"
            )
        return values


def checked_keys(keys: Ids) -> Ids:
    """Check the type and shape of keys.

    Raises:
        InvalidInput: the keys are not int64 [n].
    """
    if not isinstance(keys, np.ndarray):
        raise InvalidInput(f"keys: a {type(keys).__name__}, expected a NumPy array, int64 [n]")
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise InvalidInput(f"keys of shape {list(keys.shape)} and type {keys.dtype}: expected int64 [n]")
    return keys
