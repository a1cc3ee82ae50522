"""The target for lookups by raw id or row number in this process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction
from deltasync.client.targets.keyed_table import Allocate, KeyedRows, KeyIndex, Places, RowNumbers
from deltasync.client.targets.local import LocalTarget, Side
from deltasync.client.targets.numpy_target import rows_at, staged_rows
from deltasync.client.targets.target import Reading, Reads, Release, Written, number_of_copies
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, Mask, RowBatch, Values, distinct, members
from deltasync.core.tables import TableKind, TableSpec, raw_ids_of

# The entries of a map, see `core.tables`.
Entries = NDArray[np.int64]


class KeyedTarget(LocalTarget["KeyedCopy", "KeyedReading"]):
    """Keeps tables as rows by key: by raw id if the model has a map of raw ids for the table, else by row number.

    Deleted rows and rows without a raw id cannot be looked up. Checksums cover all rows. The target drops tables
    that the consumer no longer follows.
    """

    def __init__(self, *, reads: Reads = "pause") -> None:
        """Start with no tables.

        Args:
            reads: see `NumpyTarget`.

        Raises:
            InvalidInput: `reads` is not "pause" or "copies".
        """
        copies = [KeyedCopy(in_place=reads == "copies") for _ in range(number_of_copies(reads))]
        super().__init__(reads, [Side(each, KeyedReading(tables=each.tables)) for each in copies])

    def apply(self, release: Release) -> Written | None:
        """Write a release: see `LocalTarget.apply`. Rows for a quantised module are a Contradiction."""
        release.check_numbers()
        return super().apply(release)


@dataclass(frozen=True, kw_only=True)
class KeyedReading(Reading):
    """A `Reading` of `tables` by name, with rows by key."""

    tables: "Mapping[str, KeyedRows]"


class KeyedCopy:
    """The tables of a model by name: for lookups by key, and by row number; with indices of raw ids."""

    def __init__(self, allocate: Allocate = np.zeros, *, in_place: bool = False) -> None:
        """Start empty.

        With `in_place`, all rows of a table are written into its current arrays, because no reader waits
        meanwhile. Otherwise new arrays are filled before readers have to wait.
        """
        self._allocate = allocate
        self._in_place = in_place
        self.tables: dict[str, KeyedRows] = {}
        self.by_number: dict[str, NumberedTable] = {}
        self.indices: dict[str, KeyIndex] = {}

    def stage(self, release: Release) -> Callable[[], Written]:
        """See `Copy`. New arrays are filled at once, since they have no readers yet."""
        by_number = {table.name: self._numbered(table, release) for table in release.tables}
        puts = [by_number[rows.table.name].stage(rows) for rows in release.rows]
        digests: list[RowDigests | None] = [None] * len(puts)
        fresh = {name for name, table in by_number.items() if table is not self.by_number.get(name)}
        reset = [
            by_number[table.name] for table in release.tables if release.resets(table) and table.name not in fresh
        ]
        maps = maps_of(release.tables)
        changes = {
            table.name: self._change(table, maps[table.name], by_number[table.name].there, release)
            for table in release.tables
            if table.name in maps
        }
        indices = {of: change.index for of, change in changes.items()}
        made = {of for of, index in indices.items() if index is not self.indices.get(of)}
        before = dict(self.tables)  # Freed after the write, because freeing takes time, too.
        places: dict[str, Places] = {name: RowNumbers(table.there) for name, table in by_number.items()}
        places.update(indices)
        tables = {name: KeyedRows(places[name], table.rows) for name, table in by_number.items()}

        def put(*, unread: bool) -> None:
            for number, (rows, put_rows) in enumerate(zip(release.rows, puts, strict=True)):
                if (rows.table.name in fresh) is unread:
                    digests[number] = put_rows()
            for of, change in changes.items():
                if (of in made) is unread:
                    change.make()

        def write() -> Written:
            for table in reset:
                table.rows.fill(0)
                table.there.fill(False)
            put(unread=False)
            self.by_number, self.indices = by_number, indices
            for name in before.keys() - tables.keys():
                del self.tables[name]
            self.tables.update(tables)
            return Written(digests)

        put(unread=True)
        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Rows of a table by row number; zeros for rows that are new since the last release."""
        here = self._of(table)
        return None if here is None else rows_at(here.rows, ids)

    def _kept(self, table: TableSpec, release: Release) -> "NumberedTable | None":
        """The table's current rows; None if the release resets them."""
        return None if release.resets(table) else self._of(table)

    def _of(self, table: TableSpec) -> "NumberedTable | None":
        """The current table, unless its rows now have another form."""
        here = self.by_number.get(table.name)
        return here if here and (here.rows.shape[1], here.rows.dtype) == (table.dim, table.dtype) else None

    def _change(self, table: TableSpec, id_map: TableSpec, there: Mask, release: Release) -> "_IndexChange":
        """The changes of a table's index, which starts empty if the table or its map is reset."""
        index = self.indices.get(table.name)
        goes_on = index is not None and all(self._kept(each, release) for each in (table, id_map))
        rows = [rows for rows in release.rows if rows.table.name == table.name]
        entries = [rows for rows in release.rows if rows.table.name == id_map.name]
        kept = self._kept(id_map, release)
        touched = ids_of(rows) if goes_on else np.arange(id_map.rows)
        change = RawIdChange.of(touched, entries, lambda rows: _entries(kept, rows))
        if release.resets(table):
            there = np.zeros_like(there)
        if index is not None and goes_on:
            _check_others(id_map.name, index, change)
        elif index is None or not self._in_place:
            index = KeyIndex(self._allocate)
        before, after = there[change.rows], there[change.rows]
        for each in rows:
            after[change.at(each.ids)] = not each.deleted
        before &= (change.before != 0) & goes_on
        after &= change.after != 0
        changed = (before != after) | (change.before != change.after)
        erased, added = before & changed, after & changed
        keys = raw_ids_of(change.after[added])
        # A larger index is built here, before readers have to wait.
        room = index.with_room(len(keys), cleared=not goes_on)
        clears = room is index and not goes_on
        return _IndexChange(room, clears, raw_ids_of(change.before[erased]), keys, change.rows[added])

    def _numbered(self, table: TableSpec, release: Release) -> "NumberedTable":
        """The arrays for a table: the current ones, or new ones with the rows that it keeps."""
        current, kept = self._of(table), self._kept(table, release)
        if kept and len(kept.rows) >= table.rows:
            return kept
        if self._in_place and current and not kept and len(current.rows) == table.rows:
            return current
        rows = self._allocate((table.rows, table.dim), table.dtype)
        new = NumberedTable(rows, self._allocate((table.rows, 1), np.bool_)[:, 0])
        if kept:
            new.rows[: len(kept.rows)], new.there[: len(kept.there)] = kept.rows, kept.there
        return new


@dataclass(frozen=True, eq=False)
class NumberedTable:
    """A table by row number, and a mask of the existing rows. Deleted and never written rows do not exist."""

    rows: Values
    there: Mask

    def stage(self, rows: RowBatch) -> Callable[[], RowDigests | None]:
        """Prepare to write rows; the returned function returns their digests in memory."""
        put = staged_rows(self.rows, rows.ids, rows.values, digested=True)

        def write() -> RowDigests | None:
            self.there[rows.ids] = not rows.deleted
            return put()

        return write


@dataclass(frozen=True, eq=False)
class _IndexChange:
    """A release's changes of an index: keys to remove, or all of them, and keys to add with their rows."""

    index: KeyIndex
    clears: bool
    erased: Ids
    keys: Ids
    rows: Ids

    def make(self) -> None:
        if self.clears:
            self.index.clear()
        self.index.remove(self.erased)
        self.index.put(self.keys, self.rows)


def _check_others(table: str, index: KeyIndex, change: "RawIdChange") -> None:
    """Check that the raw ids in a release do not belong to rows that it does not touch."""
    named, raw_ids = named_raw_ids(change.after)
    owners = index.find(raw_ids)
    foreign = np.flatnonzero((owners >= 0) & ~np.isin(owners, change.rows))
    if len(foreign):
        at = foreign[0]
        raise two_rows(table, int(raw_ids[at]), [int(owners[at]), int(change.rows[named][at])])


def _entries(id_map: NumberedTable | None, rows: Ids) -> Entries:
    """The entries of rows in a map, zeros if there is none."""
    entries = np.zeros(len(rows), np.int64)
    if id_map:
        inside = rows < len(id_map.rows)
        entries[inside] = id_map.rows[rows[inside], 0]
    return entries


@dataclass(frozen=True, eq=False)
class RawIdChange:
    """The map entries, before and after, of all `rows` that a release changes in a table or its map."""

    rows: Ids
    before: Entries
    after: Entries

    @classmethod
    def of(cls, touched: Ids, entries: Sequence[RowBatch], current: Callable[[Ids], Entries]) -> "RawIdChange":
        """The change of `touched` rows and of `entries` of the map. Two rows with one raw id: Contradiction."""
        rows = distinct(np.concatenate([touched, *(each.ids for each in entries)]))
        before = current(rows)
        after = before.copy()
        for each in entries:
            after[np.searchsorted(rows, each.ids)] = each.values[:, 0]
        change = cls(rows, before, after)
        change._check(entries)
        return change

    @property
    def erased(self) -> Ids:
        """The raw ids that no row has after the release: [m]."""
        before = distinct(self.before[self.before != 0])
        return raw_ids_of(before[~members(before, distinct(self.after))])

    def at(self, rows: Ids) -> Ids:
        """The indices of row ids in `rows`."""
        return np.searchsorted(self.rows, rows)

    def _check(self, entries: Sequence[RowBatch]) -> None:
        order = np.argsort(self.after, kind="stable")
        ordered = self.after[order]
        twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0))
        if len(twice):
            rows = self.rows[order[twice[0] : twice[0] + 2]].tolist()
            raise two_rows(entries[0].table.name, int(raw_ids_of(ordered[twice[0]])), rows)


def two_rows(table: str, raw_id: int, rows: Iterable[int]) -> Contradiction:
    """The error for a map with the same raw id for two rows."""
    first, second = sorted(rows)
    return Contradiction(f"table {table!r}: raw id {raw_id} has two rows, {first} and {second}")


def maps_of(tables: Iterable[TableSpec]) -> dict[str, TableSpec]:
    """The maps of raw ids among tables, by the name of the table that they belong to."""
    return {table.of: table for table in tables if table.kind is TableKind.ID_MAP}


def ids_of(rows: Iterable[RowBatch]) -> Ids:
    """The row ids of batches, concatenated."""
    return np.concatenate([np.empty(0, np.int64), *(each.ids for each in rows)])


def named_raw_ids(entries: Entries) -> tuple[Mask, Ids]:
    """A mask of the map entries with a raw id, and these raw ids."""
    named = entries != 0
    return named, raw_ids_of(entries[named])
