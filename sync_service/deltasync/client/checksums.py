"""Checksums of what a target really holds: its rows are read back before and after every release."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deltasync.client.targets import ReadableTarget, Release
from deltasync.core.digests import checksum_of
from deltasync.core.rows import BLOCK_ROWS, Ids, RowBatch
from deltasync.core.tables import TableSpec


@dataclass
class _TableChecksum:
    """What a target holds of one table.

    Attributes:
        digest: of all rows, as far as releases have touched them.
        swept: of the rows before `upto`, which have been read again since the sweep began.
        upto: how far the sweep has come.
    """

    digest: int = 0
    swept: int = 0
    upto: int = 0


class TargetChecksums:
    """The checksum of each table of a target, at the cost of the rows that change.

    With every release, and now and then without one, one more block of rows is read again, table by table: rows
    that something else has changed are found in the end, even if no release touches them.
    """

    def __init__(self, target: ReadableTarget) -> None:
        self._target = target
        self._checksums: dict[str, _TableChecksum] = {}
        self._tables: dict[str, TableSpec] = {}  # As of the last release: they may have grown since.
        self._sweeping = 0  # Index of the table that is being swept.

    def before(self, release: Release) -> None:
        """Take out what a release is about to overwrite."""
        for table in release.tables:
            if release.resets(table):
                self._checksums[table.name] = _TableChecksum()
            elif self._is_new(table):
                self._checksums[table.name] = _TableChecksum(self._digest(table, np.arange(table.rows)))
        for rows in release.rows:
            if not release.resets(rows.table):
                known = self._tables.get(rows.table.name, rows.table)
                held = rows[: int(np.searchsorted(rows.ids, known.rows))]
                checksum, (swept, others) = self._checksums[rows.table.name], self._digests(held)
                checksum.digest, checksum.swept = checksum.digest - swept - others, checksum.swept - swept

    def after(self, release: Release) -> dict[str, int]:
        """Add what the target holds now: the checksum of each table that it keeps, by name."""
        for rows in release.rows:
            checksum, (swept, others) = self._checksums[rows.table.name], self._digests(rows)
            checksum.digest, checksum.swept = checksum.digest + swept + others, checksum.swept + swept
        self._tables = {table.name: table for table in release.tables}
        return self.look(release.tables)

    def look(self, tables: Sequence[TableSpec]) -> dict[str, int]:
        """Read one more block of what the target holds: the checksum of each table that it keeps, by name."""
        no_rows = np.empty(0, np.int64)
        kept = [table for table in tables if self._target.read(table, no_rows) is not None]
        if kept:
            self._sweep(kept[self._sweeping % len(kept)])
        return {table.name: self._checksums[table.name].digest % 2**64 for table in kept}

    def _is_new(self, table: TableSpec) -> bool:
        """Whether nothing is known of a table, at least not in the form in which it comes now."""
        known = self._tables.get(table.name)
        return table.name not in self._checksums or bool(known and replace(known, rows=table.rows) != table)

    def _sweep(self, table: TableSpec) -> None:
        """Read the next block of a table. At its end, the digest of what was read replaces the one kept so far."""
        checksum = self._checksums[table.name]
        block = np.arange(checksum.upto, min(checksum.upto + BLOCK_ROWS, table.rows))
        checksum.swept += self._digest(table, block)
        checksum.upto += len(block)
        if checksum.upto == table.rows:
            self._checksums[table.name] = _TableChecksum(checksum.swept)
            self._sweeping += 1

    def _digests(self, rows: RowBatch) -> tuple[int, int]:
        """Digests of these rows as the target holds them: of the swept ones, and of the others."""
        swept = int(np.searchsorted(rows.ids, self._checksums[rows.table.name].upto))
        return self._digest(rows.table, rows.ids[:swept]), self._digest(rows.table, rows.ids[swept:])

    def _digest(self, table: TableSpec, ids: Ids) -> int:
        total = 0
        for start in range(0, len(ids), BLOCK_ROWS):
            block = ids[start : start + BLOCK_ROWS]
            rows = self._target.read(table, block)
            total += 0 if rows is None else checksum_of(block, rows)
        return total
