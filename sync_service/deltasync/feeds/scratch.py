"""Room for rows that are under way: in memory, or, beyond a bound, in files that nobody else sees."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.storage.mapping import Mapping
from deltasync.storage.table_files import reserve


def room_for(shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path | None, what: str) -> NDArray[Any]:
    """An array in an unlinked file in `folder`, or in memory if there is no folder; `what` names it in errors.

    Raises:
        StorageFailed: there is no room.
    """
    size = math.prod(shape) * dtype.itemsize
    if folder is None or not size:  # No file can be mapped that is empty.
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve(file, size, what)
        return Mapping(file.fileno(), size, what).array(dtype, shape)
