"""A release: what a replica lacks, frozen at one version."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sync_service.codec import chunked
from sync_service.log import Seal
from sync_service.mapped import reserve
from sync_service.stamps import Ids, StampedTable, Values

# A larger release is kept in an unlinked file, so that memory stays bounded however much a replica lacks.
_IN_MEMORY_BYTES = 64 << 20


@dataclass
class Release:
    """Sorted ids and current values of every row changed after some version, as of the cut `seal`.

    Attributes:
        seal: the cut; None when nothing is published yet.
        tables: slot, ids [n] and values [n, D] of each table with changed rows.
    """

    seal: Seal | None
    tables: list[tuple[int, Ids, Values]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(len(ids) for _, ids, _ in self.tables)

    def chunks(self) -> Iterator[tuple[int, Ids, Values]]:
        """Slot, ids and values, in pieces of bounded size."""
        for slot, ids, values in self.tables:
            yield from ((slot, *piece) for piece in chunked(ids, values))


def freeze(tables: list[StampedTable], after: int, seal: Seal | None, scratch: Path) -> Release:
    """Copy every row changed after version `after`. Not while a cut is being applied."""
    changed = [table.changed_since(after) for table in tables]
    total = sum(len(ids) * table.table.row_bytes for ids, table in zip(changed, tables, strict=True))
    release = Release(seal)
    for slot, (ids, table) in enumerate(zip(changed, tables, strict=True)):
        if len(ids):
            shape = (len(ids), table.table.dim)
            spill = total > _IN_MEMORY_BYTES
            values = _unlinked_array(shape, table, scratch) if spill else np.empty(shape, table.table.dtype)
            table.read(ids, values)
            release.tables.append((slot, ids, values))
    return release


def _unlinked_array(shape: tuple[int, int], table: StampedTable, scratch: Path) -> Values:
    with tempfile.TemporaryFile(dir=scratch) as file:
        reserve(file, shape[0] * shape[1] * table.table.dtype.itemsize, f"a release of table {table.table.name!r}")
        return np.memmap(file, table.table.dtype, mode="r+", shape=shape)
