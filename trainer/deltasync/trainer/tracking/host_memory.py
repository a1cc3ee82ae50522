"""Rows in host memory: selected into memory that was used before, and replaced a row at a time."""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.core.digests import words_of
from deltasync.kernels.rows import scatter

# malloc gives larger blocks back to the system as soon as they are freed.
_LARGE_BYTES = 32 << 20


class ReadMemory:
    """Host memory for what reads return.

    Touching new memory costs more than copying rows into it. Once nobody refers to what a read has returned, the
    next read uses its memory again, and gives back to the system what it does not need.
    """

    def __init__(self) -> None:
        self._free: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next read."""
        return sum(block.nbytes for block in self._free.copy().values())

    def select(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copies of the rows [n, d] with these ids, on the same device."""
        nbytes = len(ids) * rows.shape[1] * rows.element_size()
        if rows.is_cuda or nbytes < _LARGE_BYTES:
            return rows.index_select(0, ids)
        copies = torch.from_numpy(self._take(nbytes)).view(rows.dtype).view(len(ids), rows.shape[1])
        return torch.index_select(rows, 0, ids, out=copies)

    def trim(self) -> None:
        """Give back to the system what the read that ends now has not used."""
        self._free.clear()

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        blocks = self._free.copy().items()
        fitting = [(block.nbytes, key) for key, block in blocks if nbytes <= block.nbytes <= 4 * nbytes]
        # Pages that are never touched cost nothing.
        block = self._free.pop(min(fitting)[1]) if fitting else np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        used = block[:nbytes]
        weakref.finalize(used, self._free.__setitem__, id(block), block).atexit = False
        return used


def replace_rows(rows: torch.Tensor, ids: torch.Tensor, column: int, values: torch.Tensor) -> None:
    """Set the rows [n, d] with these ids, in host memory, from a column on."""
    words = words_of(rows.numpy())
    scatter(words, column * words.shape[1] // rows.shape[1], ids.numpy(), words_of(values.numpy()))
