"""Checksums of what a target really holds: its rows are read back before and after every release."""

import numpy as np

from sync_service.client.targets import ReadableTarget, Release
from sync_service.digests import BLOCK_ROWS, Digest, digest
from sync_service.tables import Ids, Table


class HeldChecksums:
    """The checksum of each table of a target, at the cost of the rows that change."""

    def __init__(self, target: ReadableTarget) -> None:
        self._target = target
        self._digests: dict[str, Digest] = {}

    def before(self, release: Release) -> None:
        """Take out what a release is about to overwrite."""
        for table in release.tables:
            if release.resets(table):
                self._digests[table.name] = Digest()
            elif table.name not in self._digests:
                self._digests[table.name] = self._digest(table, np.arange(table.rows))
        for rows in release.rows:
            if not release.resets(rows.table):
                self._digests[rows.table.name] -= self._digest(rows.table, rows.ids)

    def after(self, release: Release) -> dict[str, int]:
        """Add what the target holds now: the checksum of each table that it keeps, by name."""
        for rows in release.rows:
            self._digests[rows.table.name] += self._digest(rows.table, rows.ids)
        no_rows = np.empty(0, np.int64)
        kept = [table for table in release.tables if self._target.read(table, no_rows) is not None]
        return {table.name: self._digests[table.name].checksum for table in kept}

    def _digest(self, table: Table, ids: Ids) -> Digest:
        total = Digest()
        for start in range(0, len(ids), BLOCK_ROWS):
            block = ids[start : start + BLOCK_ROWS]
            rows = self._target.read(table, block)
            total += Digest() if rows is None else digest(block, rows)
        return total
