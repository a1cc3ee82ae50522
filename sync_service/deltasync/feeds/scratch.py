"""Room for rows that are under way: in memory, or, beyond a bound, in files that nobody else sees."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.storage.mapped_table import reserve


def room_for(shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path | None, what: str) -> NDArray[Any]:
    """An array in an unlinked file in `folder`, or in memory if there is no folder; `what` names it in errors.

    Raises:
        StorageFailed: there is no room.
    """
    if folder is None:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve(file, math.prod(shape) * dtype.itemsize, what)
        return np.memmap(file, dtype, mode="r+", shape=shape)
