"""The rows that raw ids take that a managed collision module does not know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.client.modules.collision import collision_module_of, hashes
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec

# Kept with the module, so that another target over the same module knows them.
_RANGES = "_deltasync_id_ranges"


def id_ranges_of(module: nn.Module, table: TableSpec) -> "IdRanges":
    """The place of the rows that unknown raw ids take; raises what `id_map_of` does."""
    return IdRanges(*collision_module_of(module, table), table)


class IdRanges:
    """The rows that raw ids take that a managed collision module does not know: one for each rank of the trainer.

    An MCH module by itself has one such row, its last. Where the trainer has others, the module's `remap` is
    replaced by one that knows them.

    Attributes:
        name: the module's FQN.
        table: the table.
    """

    def __init__(self, name: str, module: nn.Module, table: TableSpec) -> None:
        self.name = name
        self._module = module
        self.table = table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`.

        Raises:
            Contradiction: ranges that overlap or leave gaps, or rows that the module cannot give to unknown ids.
        """
        by_row = {} if reset else self._held
        for each in rows:  # Nearly all of them may be zeros: no loop over them.
            by_row = {row: held for row, held in by_row.items() if not (each.ids == row).any()}
            some = each.values.any(axis=1)
            by_row.update(zip(each.ids[some].tolist(), map(tuple, each.values[some].tolist()), strict=True))
        ranges = _Ranges.of(by_row, self.table).on(next(self._module.buffers()).device)
        by_itself = not by_row or ranges.defaults.tolist() == [self.table.rows - 1]
        if hashes(self._module) and by_row:
            raise Contradiction(
                f"table {self.table.name!r}: unknown ids take rows {ranges.defaults.tolist()} in the trainer, in "
                f"module {self.name} those that they hash to"
            )

        def write() -> None:
            self._module.__dict__[_RANGES] = (by_row, ranges)
            if by_itself:
                self._module.__dict__.pop("remap", None)
            else:
                self._module.__dict__["remap"] = MethodType(_remap, self._module)

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        values = np.zeros((len(ids), 3), np.int64)
        for row, each in self._held.items():
            values[ids == row] = each
        return values

    @property
    def _held(self) -> dict[int, tuple[int, ...]]:
        """First raw id, end, and first row of the shard, by default row."""
        held: dict[int, tuple[int, ...]] = self._module.__dict__.get(_RANGES, ({}, None))[0]
        return held


@dataclass(frozen=True, eq=False)
class _Ranges:
    """The ends of the ranges of raw ids, ascending, and the row that unknown ids of each take: [ranks] each."""

    ends: torch.Tensor
    defaults: torch.Tensor

    @classmethod
    def of(cls, by_row: dict[int, tuple[int, ...]], table: TableSpec) -> "_Ranges":
        """The ranges that a table says.

        Raises:
            Contradiction: they overlap, leave gaps, or are of another shard.
        """
        ordered = sorted((*each, row) for row, each in by_row.items())
        begin = 0
        for first, end, first_row, row in ordered:
            if first != begin or end <= first or not 0 <= first_row <= row < table.rows:
                raise Contradiction(
                    f"table {table.name!r}: unknown ids from {first} to {end} take row {row}, of a shard from row "
                    f"{first_row} on; expected ranges one after another from 0 on, each with a row of its shard"
                )
            begin = end
        ends, defaults = [each[1] for each in ordered], [each[3] for each in ordered]
        return cls(torch.tensor(ends, dtype=torch.int64), torch.tensor(defaults, dtype=torch.int64))

    def on(self, device: torch.device) -> "_Ranges":
        """The same on a device: a forward there need not bring them."""
        return _Ranges(self.ends.to(device), self.defaults.to(device))

    def rows(self, raw: torch.Tensor) -> torch.Tensor:
        """The row that each of some unknown raw ids takes."""
        here = self.on(raw.device)
        ends, defaults = here.ends, here.defaults
        ranks = torch.searchsorted(ends, raw, right=True)
        # Ids outside of all ranges go to the ranks in turn, taken as unsigned numbers.
        outside = (raw < 0) | (ranks == len(ends))
        return defaults[torch.where(outside, _unsigned_modulo(raw, len(ends)), ranks)]


def _unsigned_modulo(raw: torch.Tensor, number: int) -> torch.Tensor:
    return torch.where(raw < 0, raw % number + 2**64 % number, raw) % number


def _remap(module: Any, features: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """`MCHManagedCollisionModule.remap` of a module whose unknown ids take several rows."""
    raw, rows, (_, ranges) = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping, module.__dict__[_RANGES]
    remapped = {}
    for name, feature in features.items():
        values = feature.values()
        at = torch.searchsorted(raw[:-1], values)
        remapped[name] = type(feature)(
            values=torch.where(raw[at] == values, rows[at], ranges.rows(values)),
            lengths=feature.lengths(),
            offsets=feature.offsets(),
            weights=feature.weights_or_none(),
        )
    return remapped
