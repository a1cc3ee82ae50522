"""Checksums that prove what a target holds.

A target that keeps rows in this process digests each row from its own memory right after writing it. Any other
target is read back once it has written a release. In turn, all other rows are read again as well.
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
    """The checksum of each table of a target, at the cost of the rows that change and of 8 bytes a row.

    With every release, and now and then without one, one more block of rows is read again, table by table. Rows
    that something else has changed are found in the end, even if no release touches them.
    """

    def __init__(self, target: ReadableTarget) -> None:
        self._target = target
        self._tables: Sequence[TableSpec] = ()  # Of the last release.
        self._digests: dict[str, TableDigests] = {}  # Of those of them that the target keeps.
        self._sweeping = 0  # Index of the table that is being swept.
        self._question = 0
        self._unread = deque[tuple[str, int]]()  # Blocks still to be read for the question: table, first row.

    def after(self, release: Release, written: Written | None = None) -> dict[str, int]:
        """Take a release into account that the target has applied.

        A row that came with another digest than the target holds now is damaged. The checksum of its table is then
        a wrong one, and the service sends the table again.

        Args:
            release: the release.
            written: what the target has returned from `apply`. Where it is None, the rows are read back.

        Returns:
            The checksum of each table that the target keeps, by name.

        Raises:
            Contradiction: a table has no such rows.
        """
        if release.tables != self._tables or release.resync or release.whole:
            self._follow(release)
        # A target of a user may return anything.
        digests = written.digests if isinstance(written, Written) else [None] * len(release.rows)
        for rows, written_digests in zip(release.rows, digests, strict=True):
            if not (table := self._digests.get(rows.table.name)):
                continue
            if written_digests is not None:
                _note(table, rows, written_digests)
                continue
            for block in rows.blocks(BLOCK_ROWS):
                _note(table, block, self._read(table, block.ids))
        return self.look()

    @property
    def by_table(self) -> dict[str, int]:
        """The checksum of each table that the target keeps, by name."""
        return {name: digests.checksum for name, digests in self._digests.items()}

    def look(self) -> dict[str, int]:
        """Read one more block of what the target holds: the checksum of each table that it keeps, by name."""
        if self._digests:
            self._sweep([*self._digests.values()][self._sweeping % len(self._digests)])
        return self.by_table

    def read_again(self, question: int, seconds: float) -> int:
        """Read for a while what the target holds, from the beginning if it is another question than before.

        Returns how many rows are left.
        """
        if question != self._question:
            self._question = question
            self._unread = deque(
                (name, some.start) for name, each in self._digests.items() for some in _blocks(each.table.rows)
            )
        ends = time.monotonic() + seconds
        while self._unread:
            name, start = self._unread.popleft()
            if digests := self._digests.get(name):  # The rows of a new table were read back as they came.
                self._read_block(digests, start)
            if time.monotonic() >= ends:
                break
        return sum(self._rows_from(name, start) for name, start in self._unread)

    def forget_question(self) -> None:
        """Begin anew with the next question: the service has lost what was found for the last one."""
        self._question = 0

    def _rows_from(self, name: str, start: int) -> int:
        digests = self._digests.get(name)
        return min(BLOCK_ROWS, digests.table.rows - start) if digests else 0

    def _follow(self, release: Release) -> None:
        """Begin with the tables that are new or begin anew, and forget those that do not come any more."""
        before, self._digests, self._tables = self._digests, {}, release.tables
        for table in release.tables:
            if self._target.read(table, _NO_ROWS) is None:
                continue
            same = before[table.name].grown_to(table) if table.name in before else None
            self._digests[table.name] = digests = same or TableDigests(table)
            if release.resets(table):
                self._digests[table.name] = TableDigests(table)
            elif not same:  # The target may have held it before.
                for some in _blocks(table.rows):
                    self._read_block(digests, some.start)

    def _sweep(self, digests: "TableDigests") -> None:
        """Read the next block of a table again."""
        digests.swept += self._read_block(digests, digests.swept)
        if digests.swept == digests.table.rows:
            digests.swept = 0
            self._sweeping += 1

    def _read_block(self, digests: "TableDigests", start: int) -> int:
        """Read a block of rows; how many there are."""
        ids = np.arange(start, min(start + BLOCK_ROWS, digests.table.rows))
        digests.put(ids, self._read(digests, ids))
        return len(ids)

    def _read(self, table: "TableDigests", ids: Ids) -> RowDigests:
        """Digests of rows as the target holds them; of a table that it has ceased to keep, as of zeros."""
        rows = self._target.read(table.table, ids)
        return np.zeros(len(ids), np.uint64) if rows is None else row_digests(rows)


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

    def put(self, ids: Ids, digests: RowDigests) -> None:
        """Set the digests [n] of rows `ids` [n], each of which comes once.

        Raises:
            Contradiction: the table has no such rows.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.table.rows:
            sent = f"rows {ids.min()} to {ids.max()}"
            raise Contradiction(
                f"table {self.table.name!r} has {counted(self.table.rows, 'row')}, and was sent {sent}"
            )
        change = exchange(self._digests, np.ascontiguousarray(ids), digests)
        self.checksum = (self.checksum + int(change)) % 2**64


def _note(table: TableDigests, rows: RowBatch, digests: RowDigests) -> None:
    """Note the digests of rows of a release, as the target holds them now."""
    if rows.digests is not None and not rows.deleted:
        damaged = digests != rows.digests
        if damaged.any():
            text = "table %r: %s came damaged, or were not written as they came"
            logger.error(text, rows.table.name, ranges(rows.ids[damaged]))
            # The service has another digest of each of them, whichever of both is wrong.
            digests = np.where(damaged, ~rows.digests, digests)
    table.put(rows.ids, digests)


def _blocks(rows: int) -> list[slice]:
    """All of some rows, a block at a time."""
    return [slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS)]
