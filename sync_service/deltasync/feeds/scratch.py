"""Room for rows that are under way: in memory, or, beyond a bound, in files that nobody else sees."""

import math
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.storage.files import reserve, writing
from deltasync.storage.mapping import Mapping
from deltasync.storage.table_files import offsets


class Room:
    """Arrays in memory or, all of them, in one unlinked file: a process is allowed only so many mappings."""

    def __init__(self, sizes: Iterable[int], folder: Path | None, what: str) -> None:
        """Make room for arrays of these sizes, bytes: in a file in `folder`, or in memory if there is no folder;
        `what` names it in errors.

        Raises:
            StorageFailed: there is no room.
        """
        self._mapping: Mapping | None = None
        self._taken = 0
        size = offsets(sizes)[-1]
        if folder is not None and size:  # No file can be mapped that is empty.
            with writing(what, folder, size), tempfile.TemporaryFile(dir=folder) as file:
                reserve(file, size, what, folder)
                self._mapping = Mapping(file.fileno(), size, what)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next array, not more than there is room for. A file is freed once none of them is left."""
        if self._mapping is None:
            return np.empty(shape, dtype)
        offset = self._taken
        self._taken = offsets([math.prod(shape) * dtype.itemsize], offset)[-1]
        return self._mapping.array(dtype, shape, offset)


class FileBytes:
    """How many bytes are in such files. Any thread.

    Attributes:
        total: so many.
    """

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count a file."""
        with self._lock:
            self.total += size

    def free(self, size: int) -> None:
        """Count a file no more."""
        self.add(-size)
