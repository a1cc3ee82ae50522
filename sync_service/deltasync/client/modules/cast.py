"""Parameters and buffers that are narrower or wider than their tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltasync.client.modules.tensor import Tensor, torch_type
from deltasync.client.modules.tensor_rows import TensorRows
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind

# Kept with the module, so that another target over the same module, or a copy of it, knows them.
_ROUNDED = "_deltasync_rounded_rows"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CastTensor(Tensor):
    """A floating parameter or buffer, as the place of a floating table of another type.

    The module has the rows rounded, or in more bits. `read` gives the very rows that were written where the module
    still has what became of them, and others where it has not. Rows of an embedding table fit; what rounding takes
    off others is kept beside the module.

    Attributes:
        held_type: the type that the tensor must have.
    """

    held_type: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The type that it must have."""
        return self.held_type

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`."""
        cast = [each.with_values(each.table, self._bits(self._cast(each.values))) for each in rows]
        write_cast = super().stage(cast, reset=reset)
        if not self._rounds:
            return write_cast
        exact = self._exact_rows().copy()
        if reset:
            exact[:] = 0
        for each in rows:
            exact[each.ids] = each.values

        def write() -> None:
            write_cast()
            self.module.__dict__.setdefault(_ROUNDED, {})[self.name] = exact

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        held = self._held(ids)
        rows = self._exact_rows()[ids] if self._rounds else self._back(held)
        cast = self._cast(rows)
        same = torch.from_numpy(self._bits(held) == self._bits(cast)) | (held.isnan() & cast.isnan())
        damaged: Values = np.bitwise_xor(rows.view(_bits_of(rows)), (~same).numpy(), dtype=_bits_of(rows))
        return damaged.view(rows.dtype)

    @property
    def _rounds(self) -> bool:
        """Whether rows lose something."""
        wider = torch.promote_types(torch_type(self.table), self.held_type) == self.held_type
        return not wider and self.table.kind is not TableKind.EMBEDDING

    def _exact_rows(self) -> Values:
        """All rows as they were written, or as the module has them where none were."""
        rounded: dict[str, Values] = self.module.__dict__.get(_ROUNDED, {})
        exact = rounded.get(self.name)
        if exact is not None and (exact.shape, exact.dtype) == (tuple(self.rows.shape), self.table.dtype):
            return exact
        return self._back(self._held(np.arange(self.table.rows)))

    def _held(self, ids: Ids) -> torch.Tensor:
        bits = TensorRows(self.rows).read(ids).view(f"i{self.held_type.itemsize}")
        return torch.from_numpy(bits).view(self.held_type)

    def _cast(self, rows: Values) -> torch.Tensor:
        return torch.from_numpy(np.array(rows)).to(self.held_type)

    def _back(self, held: torch.Tensor) -> Values:
        rows: Values = held.to(torch_type(self.table)).numpy()
        return rows

    @staticmethod
    def _bits(tensor: torch.Tensor) -> Values:
        """Its numbers' bits, since NumPy has no bf16."""
        bits: Values = tensor.view(_INTEGERS[tensor.itemsize]).numpy()
        return bits


def _bits_of(rows: Values) -> np.dtype[np.generic]:
    return np.dtype(f"u{rows.itemsize}")
