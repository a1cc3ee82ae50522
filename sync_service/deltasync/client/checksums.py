"""Checksums of what a target really holds: what a release has brought is read back, and in turn all other rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from deltasync.client.table_digests import TableDigests
from deltasync.client.targets import ReadableTarget, Release
from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.rows import BLOCK_ROWS, Ids, RowBatch
from deltasync.core.tables import TableSpec

_NO_ROWS = np.empty(0, np.int64)


class TargetChecksums:
    """The checksum of each table of a target, at the cost of the rows that change, and 8 bytes for each row.

    What a release brings is read back from the target and compared, row by row, with what was received. With
    every release, and now and then without one, one more block of rows is read again, table by table: rows that
    something else has changed are found in the end, even if no release touches them.
    """

    def __init__(self, target: ReadableTarget) -> None:
        self._target = target
        self._tables: Sequence[TableSpec] = ()  # Of the last release.
        self._held: dict[str, TableDigests] = {}  # Those of them that the target keeps.
        self._sweeping = 0  # Index of the table that is being swept.

    @property
    def damaged(self) -> Mapping[str, Ids]:
        """Rows that were found to be others than had been sent, by table: int64 [n] each, ascending.

        They are, until they come again, or their table is reset. What a target held before the first release is
        taken as it was: where that was wrong, the checksum says so, and not which rows.
        """
        return {name: damaged for name, held in self._held.items() if len(damaged := held.damaged)}

    def after(self, release: Release) -> dict[str, int]:
        """Read back a release that the target has applied: the checksum of each table that it keeps, by name."""
        if release.tables != self._tables or release.resync or release.whole:
            self._follow(release)
        for rows in release.rows:
            for block in rows.blocks(BLOCK_ROWS):
                self._read_back(block)
        return self.look()

    def look(self) -> dict[str, int]:
        """Read one more block of what the target holds: the checksum of each table that it keeps, by name."""
        if self._held:
            self._sweep([*self._held.values()][self._sweeping % len(self._held)])
        return {name: held.checksum for name, held in self._held.items()}

    def _follow(self, release: Release) -> None:
        """Begin with the tables that are new or begin anew, and forget those that do not come any more."""
        known, self._held, self._tables = self._held, {}, release.tables
        for table in release.tables:
            if self._target.read(table, _NO_ROWS) is None:
                continue
            same = known[table.name].grown_to(table) if table.name in known else None
            if release.resets(table):
                self._held[table.name] = TableDigests(table)
            else:
                self._held[table.name] = same or self._read_all(table)

    def _read_all(self, table: TableSpec) -> TableDigests:
        """What the target holds of a table that it held before."""
        held = TableDigests(table)
        for start in range(0, table.rows, BLOCK_ROWS):
            ids = np.arange(start, min(start + BLOCK_ROWS, table.rows))
            held.read(ids, self._digests(table, ids))
        return held

    def _read_back(self, rows: RowBatch) -> None:
        held = self._held.get(rows.table.name)
        if held:
            received = rows.digested().digests  # Deleted rows have none.
            none = np.zeros(len(rows), np.uint64)
            held.read_back(rows.ids, self._digests(held.table, rows.ids), none if received is None else received)

    def _sweep(self, held: TableDigests) -> None:
        """Read the next block of a table again."""
        ids = np.arange(held.swept, min(held.swept + BLOCK_ROWS, held.table.rows))
        held.read_again(ids, self._digests(held.table, ids))
        held.swept += len(ids)
        if held.swept == held.table.rows:
            held.swept = 0
            self._sweeping += 1

    def _digests(self, table: TableSpec, ids: Ids) -> RowDigests:
        """Of some rows as the target holds them; of a table that it has ceased to keep, as of zeros."""
        rows = self._target.read(table, ids)
        return np.zeros(len(ids), np.uint64) if rows is None else row_digests(rows)
