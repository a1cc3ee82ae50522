"""The maps from raw ids to rows that managed collision keeps, as tables: the raw id of each row."""

import numpy as np
import torch
from torch import nn

from deltasync.core.errors import InvalidInput
from deltasync.core.raw_ids import FREE_ID
from deltasync.core.tables import TableKind, TableSpec
from deltasync.kernels.id_maps import read_sorted
from deltasync.trainer.tracking.collision_modules import CollisionModule, collision_modules
from deltasync.trainer.tracking.followed_rows import follow_numbers
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable


class IdMap:
    """The map of one managed collision module, as far as this rank has it. Within the gate.

    Attributes:
        of: the table whose rows it gives to raw ids.
        tables: the map, and the ranges of raw ids if there are some.
    """

    def __init__(self, found: CollisionModule) -> None:
        """The map as it is now.

        Raises:
            InvalidInput: it contradicts itself.
        """
        self._found, self.of = found, found.of
        self._version: tuple[int, ...] = ()
        self._column = torch.zeros(found.local_rows, dtype=torch.int64, device=found.module.device)
        self.tables = [self._tracked(table) for table in found.tables]
        self.update()

    def update(self) -> torch.Tensor:
        """Read the map anew; the local ids of the rows whose raw id has changed: int64 [n].

        Raises:
            InvalidInput: it contradicts itself; nothing was read.
        """
        version = self._buffers_version()
        if version and version == self._version:
            return self._column.new_empty(0)
        if self._found.hashes:  # Its free rows have -1. A row of `FREE_ID` is published as free, too.
            changed = follow_numbers(self._identities(), FREE_ID, -1, self._column)
        else:
            changed = follow_numbers(self._sorted(), 0, 0, self._column)
        self._version = version
        return changed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._column.nbytes

    def _tracked(self, table: TableSpec) -> TrackedTable:
        rows = self._column.view(-1, 1) if table.kind is TableKind.ID_MAP else _ranges(self._found)
        return TrackedTable(
            table, [TrackedShard(self._found.shard(table), rows)], [], fused=False, replicated=False
        )

    def _buffers_version(self) -> tuple[int, ...]:
        """What changes whenever a sorted map does; empty for one that a kernel writes to without saying so."""
        if self._found.hashes:
            return ()
        module = self._found.module
        tensors = (module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping)
        return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))

    def _identities(self) -> torch.Tensor:
        identities: torch.Tensor = self._found.module._hash_zch_identities.detach().view(-1)
        return identities

    def _sorted(self) -> torch.Tensor:
        column = torch.zeros_like(self._column)
        if column.is_cuda or not self._is_read(column):
            column = self._looked_through()
        return column

    def _is_read(self, column: torch.Tensor) -> bool:
        """Read a map in host memory into `column`, zeros; False where it has to be looked through."""
        found = self._found
        raw, rows = found.module._mch_sorted_raw_ids, found.module._mch_remapped_ids_mapping
        first, end = found.routing.range_of(found.number)
        return not read_sorted(raw.numpy(), rows.numpy(), found.row_offset, first, end, column.numpy())

    def _looked_through(self) -> torch.Tensor:
        """The column of a map anywhere, of which some raw ids may not be looked up here, or be wrong."""
        module = self._found.module
        taken = module._mch_sorted_raw_ids != FREE_ID
        raw = module._mch_sorted_raw_ids[taken]
        rows = module._mch_remapped_ids_mapping[taken] - self._found.row_offset
        self._check(raw, rows)
        column = torch.zeros_like(self._column)
        column[rows] = raw ^ FREE_ID
        column[rows[self._unreached(raw)]] = 0
        return column

    def _unreached(self, raw: torch.Tensor) -> torch.Tensor:
        """Where some raw ids [n] are not looked up here: after a reshard, that may be so."""
        routing, number = self._found.routing, self._found.number
        first, end = routing.range_of(number)
        elsewhere = torch.nonzero((raw < first) | (raw >= end)).squeeze(1)  # Mostly none: divisions are slow.
        return elsewhere[routing.shards_of(raw[elsewhere]) != number]

    def _check(self, raw: torch.Tensor, rows: torch.Tensor) -> None:
        """Check a map: raw ids [n] and their local rows [n]."""
        found, first = self._found, self._found.row_offset
        if _is_sound(raw, rows, found.local_rows):
            return
        problem = _problem(raw, rows, found.local_rows, first)
        if problem:
            raise InvalidInput(
                f"managed collision module {found.name!r}: {problem}; it holds rows {first} to "
                f"{first + found.local_rows - 1} of table {found.of!r}"
            )


def id_maps(model: nn.Module) -> list[IdMap]:
    """The maps of all managed collision modules of a model.

    Raises:
        InvalidInput: one cannot be published.
    """
    return [IdMap(found) for found in collision_modules(model)]


def _ranges(found: CollisionModule) -> torch.Tensor:
    """The ranges table of a shard: all zero but for its last row, which raw ids take that are not in the map."""
    rows = torch.from_numpy(np.zeros((found.local_rows, 3), np.int64))  # Memory that nobody touches is not taken.
    rows[-1] = torch.tensor([*found.routing.range_of(found.number), found.row_offset])
    return rows


def _is_sound(raw: torch.Tensor, rows: torch.Tensor, local_rows: int) -> bool:
    """Whether a map that is sorted by raw id has no problem; sorting it to find one takes far longer."""
    taken = torch.zeros(local_rows, dtype=torch.bool, device=rows.device)
    taken[rows[(rows >= 0) & (rows < local_rows)]] = True
    return bool((taken.sum() == len(rows)) & (raw[1:] > raw[:-1]).all())


def _problem(raw: torch.Tensor, rows: torch.Tensor, local_rows: int, first: int) -> str | None:
    if len(outside := torch.nonzero((rows < 0) | (rows >= local_rows))):
        return f"raw id {int(raw[outside[0]])} has row {int(rows[outside[0]]) + first}"
    if pair := _equal_pair(rows):
        return f"raw ids {int(raw[pair[0]])} and {int(raw[pair[1]])} both have row {int(rows[pair[0]]) + first}"
    if pair := _equal_pair(raw):
        both = f"{int(rows[pair[0]]) + first} and {int(rows[pair[1]]) + first}"
        return f"raw id {int(raw[pair[0]])} has two rows, {both}"
    return None


def _equal_pair(numbers: torch.Tensor) -> tuple[int, int] | None:
    """Where two of some numbers [n] are equal."""
    ordered, order = torch.sort(numbers, stable=True)
    equal = torch.nonzero(ordered[1:] == ordered[:-1]).view(-1)
    return (int(order[equal[0]]), int(order[equal[0] + 1])) if len(equal) else None
