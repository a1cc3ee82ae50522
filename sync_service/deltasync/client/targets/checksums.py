"""Checksums of what a target really holds: new rows are read back, and in turn all others."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.base.words import counted
from deltasync.client.targets.target import ReadableTarget, Release
from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.rows import BLOCK_ROWS, Ids
from deltasync.core.tables import TableSpec
from deltasync.kernels.digests import exchange


class TableDigests:
    """The digest of each row of a table as a target was last seen to hold it: 8 bytes a row.

    Attributes:
        table: the table.
        checksum: of all rows.
        swept: how many rows the sweep of the table has read, from the first one on.
    """

    def __init__(self, table: TableSpec) -> None:
        """All rows are zeros."""
        self.table = table
        self.checksum = self.swept = 0
        self._digests = np.zeros(table.rows, np.uint64)

    def grown_to(self, table: TableSpec) -> "TableDigests | None":
        """The same of a table that may have got more rows, zeros; None if its rows come in another form."""
        more = table.rows - self.table.rows
        if more < 0 or replace(self.table, rows=table.rows) != table:
            return None
        if more:
            self.table = table
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
        return self

    def read(self, ids: Ids, digests: RowDigests) -> None:
        """Rows `ids` [n], each once, were read, and had these digests [n].

        Raises:
            Contradiction: the table has no such rows.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.table.rows:
            sent = f"rows {ids.min()} to {ids.max()}"
            raise Contradiction(
                f"table {self.table.name!r} has {counted(self.table.rows, 'row')}, and was sent {sent}"
            )
        change = exchange(self._digests, ids, digests)
        self.checksum = (self.checksum + int(change)) % 2**64


_NO_ROWS = np.empty(0, np.int64)


class TargetChecksums:
    """The checksum of each table of a target, at the cost of the rows that change, and 8 bytes for each row.

    What a release brings is read back from the target. With every release, and now and then without one, one more
    block of rows is read again, table by table: rows that something else has changed are found in the end, even if
    no release touches them.
    """

    def __init__(self, target: ReadableTarget) -> None:
        self._target = target
        self._tables: Sequence[TableSpec] = ()  # Of the last release.
        self._held: dict[str, TableDigests] = {}  # Those of them that the target keeps.
        self._sweeping = 0  # Index of the table that is being swept.
        self._question = 0
        self._unread = deque[tuple[str, int]]()  # Blocks that are to be read again for it: table, first row.

    def after(self, release: Release) -> dict[str, int]:
        """Read back a release that the target has applied: the checksum of each table that it keeps, by name."""
        if release.tables != self._tables or release.resync or release.whole:
            self._follow(release)
        for rows in release.rows:
            if held := self._held.get(rows.table.name):
                for start in range(0, len(rows), BLOCK_ROWS):
                    self._read(held, rows.ids[start : start + BLOCK_ROWS])
        return self.look()

    @property
    def by_table(self) -> dict[str, int]:
        """The checksum of each table that the target keeps, by name."""
        return {name: held.checksum for name, held in self._held.items()}

    def look(self) -> dict[str, int]:
        """Read one more block of what the target holds: the checksum of each table that it keeps, by name."""
        if self._held:
            self._sweep([*self._held.values()][self._sweeping % len(self._held)])
        return self.by_table

    def read_again(self, question: int, seconds: float) -> int:
        """Read for a while what the target holds, from the beginning if it is another question than before.

        Returns how many rows are left.
        """
        if question != self._question:
            self._question = question
            blocks = ((name, range(0, held.table.rows, BLOCK_ROWS)) for name, held in self._held.items())
            self._unread = deque((name, start) for name, starts in blocks for start in starts)
        ends = time.monotonic() + seconds
        while self._unread:
            name, start = self._unread.popleft()
            if held := self._held.get(name):  # Of a table that is new, what came was read back.
                self._read_block(held, start)
            if time.monotonic() >= ends:
                break
        return sum(self._rows_from(name, start) for name, start in self._unread)

    def forget_question(self) -> None:
        """Begin anew with the next question, whichever it is: who asked has lost what was found so far."""
        self._question = 0

    def _rows_from(self, name: str, start: int) -> int:
        held = self._held.get(name)
        return min(BLOCK_ROWS, held.table.rows - start) if held else 0

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
            self._read_block(held, start)
        return held

    def _sweep(self, held: TableDigests) -> None:
        """Read the next block of a table again."""
        held.swept += self._read_block(held, held.swept)
        if held.swept == held.table.rows:
            held.swept = 0
            self._sweeping += 1

    def _read_block(self, held: TableDigests, start: int) -> int:
        """Read a block of rows; how many there are."""
        ids = np.arange(start, min(start + BLOCK_ROWS, held.table.rows))
        self._read(held, ids)
        return len(ids)

    def _read(self, held: TableDigests, ids: Ids) -> None:
        """Read rows as the target holds them; of a table that it has ceased to keep, as zeros."""
        rows = self._target.read(held.table, ids)
        held.read(ids, np.zeros(len(ids), np.uint64) if rows is None else row_digests(rows))
