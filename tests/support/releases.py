"""The content of releases by table, and tables that change while replicas receive releases."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.model.releases import (
    BLOCK_BYTES,
    NO_TABLES,
    FrozenRelease,
    Head,
    LargeRelease,
    Release,
    ReleaseChunk,
    Releases,
)

MEMORY_BYTES = 1 << 20


class ChangingTables:
    """Tables to make releases of, in the event loop; they may change at every await.

    Attributes:
        tables: the tables.
        past: the rows of all tables, by version number.
        open: whether replicas may receive the tables.
        releases: the releases for replicas.
    """

    def __init__(
        self, specs: Sequence[TableSpec], memory_bytes: int = MEMORY_BYTES, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.tables = [StampedTable(spec) for spec in specs]
        self.past = [self.rows()]
        self.open = True
        self.releases = Releases(self._run, self._state, memory_bytes, block_bytes)

    def rows(self) -> list[bytes]:
        """The rows of each table."""
        return [table.rows.tobytes() for table in self.tables]

    @property
    def head(self) -> int:
        return len(self.past) - 1

    def change(self, *batches: RowBatch) -> None:
        """Change some rows, as the next version."""
        by_name = {table.spec.name: table for table in self.tables}
        for batch in batches:
            by_name[batch.table.name].apply(batch, self.head + 1)
        self.past.append(self.rows())
        self.releases.have(None, self.head)

    def write(self, slot: int, ids: Sequence[int], value: float = 0) -> None:
        """Set rows of a table to a value, or to the version number, as the next version."""
        spec = self.tables[slot].spec
        values = np.full((len(ids), spec.dim), value or self.head + 1, spec.dtype)
        self.change(RowBatch.of_table(spec, ids, values))

    def delete(self, slot: int, ids: Sequence[int]) -> None:
        """Delete rows of a table, as the next version."""
        self.change(RowBatch.deletes(Shard.whole(self.tables[slot].spec), ids))

    async def get(self, after: int, whole: frozenset[int] = NO_TABLES) -> Release:
        return await self.releases.get(after, whole, self.head)

    async def small(self, after: int, whole: frozenset[int] = NO_TABLES) -> FrozenRelease:
        return frozen(await self.get(after, whole))

    async def large(self, after: int, whole: frozenset[int] = NO_TABLES) -> LargeRelease:
        release = await self.get(after, whole)
        assert isinstance(release, LargeRelease)
        return release

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)

    def _state(self) -> tuple[list[StampedTable], Head] | None:
        number = self.head
        return (self.tables, Head(number, number, 0, 0)) if self.open else None


def frozen(release: Release) -> FrozenRelease:
    """A release that fits into the memory for releases."""
    assert isinstance(release, FrozenRelease)
    return release


def live_rows(release: Release) -> dict[int, RowBatch]:
    """The rows that exist, by slot."""
    return _by_slot(frozen(release).chunks, deleted=False)


def deleted_rows(release: Release) -> dict[int, RowBatch]:
    """The deleted rows, by slot."""
    return _by_slot(frozen(release).chunks, deleted=True)


def _by_slot(chunks: Sequence[ReleaseChunk], *, deleted: bool) -> dict[int, RowBatch]:
    found: dict[int, list[RowBatch]] = {}
    for chunk in chunks:
        if chunk.rows.deleted == deleted:
            found.setdefault(chunk.slot, []).append(chunk.rows)
    return {slot: _joined(batches) for slot, batches in found.items()}


def _joined(batches: list[RowBatch]) -> RowBatch:
    ids, values = (np.concatenate([getattr(each, name) for each in batches]) for name in ("ids", "values"))
    return RowBatch(batches[0].shard, ids, values, deleted=batches[0].deleted)
