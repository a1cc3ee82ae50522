"""Rows of a tensor, read and written by their ids."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.graph import increment_version

from deltasync.client.row_memory import check_fit, rows_at, staged_rows
from deltasync.core.rows import Ids, Values

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TensorRows:
    """The rows of a tensor [rows, width], each of which lies in one piece.

    Attributes:
        held: the tensor.
    """

    held: torch.Tensor

    def stage(self, ids: Ids, values: Values) -> Callable[[], None]:
        """Prepare rows ([n, width], of the tensor's type or of one as wide), and return what writes them.

        Raises:
            Contradiction: the tensor has no such rows; nothing was written.
        """
        if self._in_host_memory:
            return self._marked(staged_rows(self._bytes, ids, np.ascontiguousarray(values).view(np.uint8)))
        check_fit(self.held.shape[0], self.held.shape[1] * self.held.itemsize, ids, values)
        held, at, rows = self.held, torch.from_numpy(ids.copy()).to(self.held.device), self._on_device(values)

        def write() -> None:
            held.index_copy_(0, at, rows)

        return write

    def stage_fill(self, row: Values) -> Callable[[], None]:
        """The same for one row ([1, width]) that all rows become."""
        if self._in_host_memory:
            items, item = _items(self._bytes), _items(np.ascontiguousarray(row).view(np.uint8))

            def fill() -> None:
                items[:] = item

            return self._marked(fill)
        held, rows = self.held, self._on_device(row)

        def write() -> None:
            held.copy_(rows.expand_as(held))

        return write

    def read(self, ids: Ids) -> Bytes:
        """The rows `ids` ([n]) as bytes [n, width x bytes of a number], in host memory."""
        if self._in_host_memory:
            return rows_at(self._bytes, ids).view(np.uint8)
        at = torch.from_numpy(ids.copy()).to(self.held.device)
        rows: Bytes = self.held.index_select(0, at).cpu().view(torch.uint8).numpy()
        return rows

    @property
    def _in_host_memory(self) -> bool:
        return self.held.device.type == "cpu"

    def _marked(self, write: Callable[[], None]) -> Callable[[], None]:
        """What writes, and has autograd know that the tensor has changed."""
        held = self.held

        def write_and_mark() -> None:
            write()
            if not held.is_inference():
                increment_version(held)

        return write_and_mark

    @property
    def _bytes(self) -> Bytes:
        held: Bytes = self.held.view(torch.uint8).numpy()
        return held

    def _on_device(self, values: Values) -> torch.Tensor:
        # A copy, since torch has no read-only tensors.
        rows = torch.empty(len(values), self.held.shape[1], dtype=self.held.dtype)
        rows.view(torch.uint8).numpy()[:] = np.ascontiguousarray(values).view(np.uint8)
        return rows.to(self.held.device)


def _items(rows: Bytes) -> NDArray[np.void]:
    """Rows [n, width] as [n] items, which NumPy copies several times as fast as it copies rows."""
    items: NDArray[np.void] = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    return items
