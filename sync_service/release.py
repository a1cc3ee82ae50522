"""A release: what a replica lacks, frozen at one version."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sync_service.codec import chunked
from sync_service.log import Seal
from sync_service.mapped import reserve
from sync_service.stamps import StampedTable
from sync_service.tables import Ids, Table, Values


@dataclass
class FrozenRelease:
    """Sorted ids and current values of every row changed after some version, as of the cut `seal`.

    Attributes:
        seal: the cut; None when nothing is published yet.
        tables: slot, ids [n] and values [n, D] of each table with changed rows.
        memory_bytes: how much memory these take; 0 when they are in unlinked files.
    """

    seal: Seal | None
    tables: list[tuple[int, Ids, Values]] = field(default_factory=list)
    memory_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(len(ids) for _, ids, _ in self.tables)

    def chunks(self) -> Iterator[tuple[int, Ids, Values]]:
        """Slot, ids and values, in pieces of bounded size."""
        for slot, ids, values in self.tables:
            yield from ((slot, *piece) for piece in chunked(ids, values))


def freeze(
    tables: Sequence[StampedTable], after: int, seal: Seal | None, scratch: Path, memory_bytes: int
) -> FrozenRelease:
    """Copy every row changed after version `after`. Not while a cut is being applied.

    A release of more than `memory_bytes` is kept in unlinked files in the folder `scratch`.
    """
    changed = [table.changed_since(after) for table in tables]
    total = sum(len(ids) * table.table.row_bytes for ids, table in zip(changed, tables, strict=True))
    spill = total > memory_bytes
    release = FrozenRelease(seal, memory_bytes=0 if spill else total)
    for slot, (ids, table) in enumerate(zip(changed, tables, strict=True)):
        if len(ids):
            values = _room_for(table.table, len(ids), scratch if spill else None)
            table.read(ids, values)
            release.tables.append((slot, _spilled(ids, table.table, scratch) if spill else ids, values))
    return release


def _room_for(table: Table, rows: int, scratch: Path | None) -> Values:
    shape = (rows, table.dim)
    return _unlinked_array(shape, table.dtype, table, scratch) if scratch else np.empty(shape, table.dtype)


def _spilled(ids: Ids, table: Table, scratch: Path) -> Ids:
    spilled = _unlinked_array(ids.shape, ids.dtype, table, scratch)
    spilled[:] = ids
    return spilled


def _unlinked_array(shape: tuple[int, ...], dtype: np.dtype[Any], table: Table, scratch: Path) -> NDArray[Any]:
    with tempfile.TemporaryFile(dir=scratch) as file:
        reserve(file, math.prod(shape) * dtype.itemsize, f"a release of table {table.name!r}")
        return np.memmap(file, dtype, mode="r+", shape=shape)
