"""Click events as arrays: what every stream yields and every feature is made from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import InvalidInput


class DataError(InvalidInput):
    """Click data that cannot be used, with where it is and what was expected there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """n events in time order, one entry of every array each."""

    index: NDArray[np.int64]
    """[n] position in the whole stream, from 0."""
    user: NDArray[np.int64]
    """[n] raw user ids, any non-negative number."""
    item: NDArray[np.int64]
    """[n] raw item ids, any non-negative number."""
    timestamp: NDArray[np.int64]
    """[n] unix seconds, UTC."""
    label: NDArray[np.float32]
    """[n] 1 where the user clicked (or liked) the item, else 0."""

    def __post_init__(self) -> None:
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if any(shape != (self.index.size,) for shape in shapes.values()):
            raise ValueError(f"the arrays of events must be 1-D and equally long; their shapes are {shapes}")

    def __len__(self) -> int:
        return self.index.size

    def take(self, rows: slice) -> "Events":
        """Return the events at `rows`, sharing memory with these."""
        return Events(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def concatenate(parts: Sequence[Events]) -> Events:
    """Return the events of all `parts` (at least one) in their order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return Events(
        **{field.name: np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Events)}
    )
