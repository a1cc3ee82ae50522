"""Checksums that prove the content of a target.

A target with rows in this process computes digests from its own memory after each write. Other targets are read
back after each release. A sweep slowly reads all other rows again.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.base.words import counted
from deltasync.client.targets.target import ReadableTarget, Release, Written
from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.rows import BLOCK_ROWS, Ids, RowBatch, ranges
from deltasync.core.tables import TableSpec
from deltasync.kernels.digests import exchange

logger = logging.getLogger(__name__)

_NO_ROWS = np.empty(0, np.int64)


class TargetChecksums:
    """The checksum of each table of a target. Keeps 8 bytes per row.

    With every release, and sometimes between releases, a sweep reads one more block of rows. So it eventually
    detects rows that other code has changed.
    """

    def __init__(self, target: ReadableTarget, block_rows: int = BLOCK_ROWS, *, sweeps: bool = True) -> None:
        self._target, self._block_rows, self._sweeps = target, block_rows, sweeps
        self._tables: Sequence[TableSpec] = ()  # The tables of the last release.
        self._digests: dict[str, TableDigests] = {}  # By table, for tables that the target keeps.
        self._sweeping = 0  # Index of the table that the sweep reads.
        self._question = 0
        self._unread = deque[tuple[str, int]]()  # Blocks to read for the question: table, first row.

    def after(self, release: Release, written: Written | None = None) -> dict[str, int]:
        """Update and return the checksums after the target has applied a release.

        A row is damaged if its digest in the target differs from the digest that came with it. The checksum of its
        table is then wrong on purpose, so the service sends the table again. `written` is the result of `apply`;
        if it is None, the rows are read back.
        """
        if release.tables != self._tables or release.resync or release.whole:
            self._follow(release)
        # A user's own target may return anything.
        digests = written.digests if isinstance(written, Written) else [None] * len(release.rows)
        for rows, written_digests in zip(release.rows, digests, strict=True):
            if not (table := self._digests.get(rows.table.name)):
                continue
            if written_digests is not None:
                _note(table, rows, written_digests)
                continue
            for block in rows.blocks(self._block_rows):
                _note(table, block, self._read(table, block.ids))
        return self.look()

    @property
    def by_table(self) -> dict[str, int]:
        """The checksum of each table that the target keeps, by name."""
        return {name: digests.checksum for name, digests in self._digests.items()}

    def look(self) -> dict[str, int]:
        """Read one more block of rows; return the checksum of each table that the target keeps, by name."""
        if self._digests and self._sweeps:
            self._sweep([*self._digests.values()][self._sweeping % len(self._digests)])
        return self.by_table

    def read_again(self, question: int, seconds: float) -> int:
        """Read rows for `seconds`, from the first row for a new `question`; return how many are left."""
        if question != self._question:
            self._question = question
            self._unread = deque(
                (name, start) for name, each in self._digests.items() for start in self._blocks(each.table)
            )
        ends = time.monotonic() + seconds
        while self._unread:
            name, start = self._unread.popleft()
            # Skip a table that is gone. A new one is not in `_unread`: its rows were read back as they arrived.
            if digests := self._digests.get(name):
                self._read_block(digests, start)
            if time.monotonic() >= ends:
                break
        return sum(self._rows_from(name, start) for name, start in self._unread)

    def forget_question(self) -> None:
        """Start from the first row with the next question. The service has lost the results for the last one."""
        self._question = 0

    def _blocks(self, table: TableSpec) -> range:
        """The first row of each block of a table."""
        return range(0, table.rows, self._block_rows)

    def _rows_from(self, name: str, start: int) -> int:
        digests = self._digests.get(name)
        return min(self._block_rows, digests.table.rows - start) if digests else 0

    def _follow(self, release: Release) -> None:
        """Start with tables that are new or reset, and forget tables that the release no longer has."""
        before, self._digests, self._tables = self._digests, {}, release.tables
        for table in release.tables:
            if self._target.read(table, _NO_ROWS) is None:
                continue
            same = before[table.name].grown_to(table) if table.name in before else None
            self._digests[table.name] = digests = same or TableDigests(table)
            if release.resets(table):
                self._digests[table.name] = TableDigests(table)
            elif not same:  # The target may have rows of this table already.
                for start in self._blocks(table):
                    self._read_block(digests, start)

    def _sweep(self, digests: "TableDigests") -> None:
        """Read the next block of a table again."""
        digests.swept += self._read_block(digests, digests.swept)
        if digests.swept == digests.table.rows:
            digests.swept = 0
            self._sweeping += 1

    def _read_block(self, digests: "TableDigests", start: int) -> int:
        """Read a block of rows; return their number."""
        ids = np.arange(start, min(start + self._block_rows, digests.table.rows))
        digests.put(ids, self._read(digests, ids))
        return len(ids)

    def _read(self, table: "TableDigests", ids: Ids) -> RowDigests:
        """Digests of the target's rows; zeros if the target no longer keeps the table."""
        rows = self._target.read(table.table, ids)
        return np.zeros(len(ids), np.uint64) if rows is None else row_digests(rows)


class TableDigests:
    """The last digest of each row of a table, 8 bytes per row, and the checksum of all rows.

    The sweep has read the first `swept` rows.
    """

    def __init__(self, table: TableSpec) -> None:
        """Start with all rows zero."""
        self.table = table
        self.checksum = self.swept = 0
        self._digests = np.zeros(table.rows, np.uint64)

    def grown_to(self, table: TableSpec) -> "TableDigests | None":
        """Extend the digests to new rows of the table, as zeros; None if rows now have another form."""
        more = table.rows - self.table.rows
        if more < 0 or replace(self.table, rows=table.rows) != table:
            return None
        if more:
            self.table = table
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
        return self

    def put(self, ids: Ids, digests: RowDigests) -> None:
        """Set the digests [n] of rows `ids` [n], without duplicates. An id outside of the table: Contradiction."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.table.rows:
            sent = f"rows {ids.min()} to {ids.max()}"
            raise Contradiction(
                f"table {self.table.name!r} has {counted(self.table.rows, 'row')}, the release has {sent}"
            )
        change = exchange(self._digests, np.ascontiguousarray(ids), digests)
        self.checksum = (self.checksum + int(change)) % 2**64


def _note(table: TableDigests, rows: RowBatch, digests: RowDigests) -> None:
    """Record the digests of a release's rows in the target."""
    if rows.digests is not None and not rows.deleted:
        damaged = digests != rows.digests
        if damaged.any():
            text = "table %r: damaged on the way, or written incorrectly by the target: %s"
            logger.error(text, rows.table.name, ranges(rows.ids[damaged]))
            # Record digests that cannot match the service's, whichever of the two is wrong.
            digests = np.where(damaged, ~rows.digests, digests)
    table.put(rows.ids, digests)
