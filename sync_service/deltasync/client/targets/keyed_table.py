"""Tables whose rows are named by 64-bit keys, looked up and changed in bulk."""

from typing import Protocol

import numpy as np

from deltasync.base.errors import InvalidInput
from deltasync.client.targets.key_index import KeyIndex
from deltasync.core.rows import Ids, Mask, Values, distinct

_FIRST_ROWS = 16


class KeyedRows:
    """Rows by key, to be looked up."""

    def __init__(self, places: "Places", rows: Values) -> None:
        """Look up the rows at some places of `rows` ([at least 1, dim])."""
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
        """The rows of some keys.

        Args:
            keys: int64 [n], of any value, in any order, also several times.

        Returns:
            A copy of the rows, [n, dim], zeros for keys that are not there; and which are there, bool [n].

        Raises:
            InvalidInput: keys of another type or shape.
        """
        places = self._places.find(checked_keys(keys))
        found = places >= 0
        values = self._rows.take(np.maximum(places, 0), axis=0)
        values[~found] = 0
        return values, found

    def keys(self) -> Ids:
        """All keys: int64 [n], ascending."""
        return np.sort(self._places.items()[0])


class Places(Protocol):
    """Where the rows of keys are."""

    def find(self, keys: Ids) -> Ids:
        """The places of some keys ([n]): int64 [n], -1 for keys that are not there."""

    def items(self) -> tuple[Ids, Ids]:
        """All keys and their places: int64 [n] each, in no order."""

    def __len__(self) -> int:
        """The number of keys."""


class KeyedTable(KeyedRows):
    """Rows by key, to be looked up and changed.

    Not for several threads at once, unless all of them only look up.
    """

    def __init__(self, dim: int, dtype: np.dtype[np.generic] | type[np.generic] = np.float32) -> None:
        self._index = KeyIndex()
        super().__init__(self._index, np.zeros((_FIRST_ROWS, dim), dtype))
        self._unused = np.arange(_FIRST_ROWS)  # Places without a key.

    def update(self, keys: Ids, values: Values) -> Mask:
        """Overwrite the rows of those keys that are there.

        Args:
            keys: int64 [n]; of one that comes several times, the last counts.
            values: [n, dim].

        Returns:
            Which keys are there: bool [n].

        Raises:
            InvalidInput: keys or values of another type or shape; nothing was changed.
        """
        values = self._checked(keys, values)
        places = self._index.find(keys)
        found = places >= 0
        self._rows[places[found]] = values[found]
        return found

    def insert(self, keys: Ids, values: Values) -> None:
        """Overwrite the rows of some keys, and add the keys that are not there; otherwise as `update`."""
        values = self._checked(keys, values)
        new = distinct(keys[self._index.find(keys) < 0])
        self._index.put(new, self._take(len(new)))
        self._rows[self._index.find(keys)] = values

    def erase(self, keys: Ids) -> Mask:
        """Forget some keys (int64 [n]) and their rows; returns which were there: bool [n].

        Raises:
            InvalidInput: keys of another type or shape; nothing was changed.
        """
        places = self._index.find(checked_keys(keys))
        found = places >= 0
        self._unused = np.concatenate([self._unused, distinct(places[found])])
        self._index.remove(distinct(keys[found]))
        return found

    def _take(self, count: int) -> Ids:
        """So many places without a key, which are to get one."""
        if (lacking := count - len(self._unused)) > 0:
            rows = len(self._rows)
            more = max(rows, lacking)
            self._rows = np.concatenate([self._rows, np.zeros((more, self.dim), self.dtype)])
            self._unused = np.concatenate([self._unused, np.arange(rows, rows + more)])
        taken, self._unused = self._unused[:count], self._unused[count:]
        return taken

    def _checked(self, keys: Ids, values: Values) -> Values:
        checked_keys(keys)
        values = np.asarray(values)
        if values.shape != (len(keys), self.dim) or not np.can_cast(values.dtype, self.dtype, "same_kind"):
            raise InvalidInput(
                f"values of shape {list(values.shape)} and type {values.dtype} for {len(keys)} keys of a table of "
                f"{self.dim} {self.dtype} values"
            )
        return values


def checked_keys(keys: Ids) -> Ids:
    """Keys as they came.

    Raises:
        InvalidInput: they are no int64 [n].
    """
    if not isinstance(keys, np.ndarray):
        raise InvalidInput(f"keys: a {type(keys).__name__}, expected a NumPy array, int64 [n]")
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise InvalidInput(f"keys of shape {list(keys.shape)} and type {keys.dtype}: expected int64 [n]")
    return keys
