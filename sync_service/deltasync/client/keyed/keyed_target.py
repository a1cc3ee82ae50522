"""Tables of a model whose rows are looked up by raw id, in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.client.keyed.key_index import KeyIndex
from deltasync.client.keyed.keyed_table import KeyedRows, Places
from deltasync.client.keyed.raw_ids import Entries, RawIdChange, ids_of, maps_of, named_raw_ids, two_rows
from deltasync.client.local_target import LocalTarget
from deltasync.client.reading import Reading, Reads, number_of_copies
from deltasync.client.row_memory import rows_at, staged_rows
from deltasync.client.targets import Release
from deltasync.core.raw_ids import raw_ids_of
from deltasync.core.rows import Ids, Mask, RowBatch, Values
from deltasync.core.tables import TableSpec


class _RowNumbers:
    """Rows whose keys are their numbers."""

    def __init__(self, there: Mask) -> None:
        """`there` says which rows there are."""
        self._there = there

    def __len__(self) -> int:
        """The number of keys."""
        return int(np.count_nonzero(self._there))

    def find(self, keys: Ids) -> Ids:
        """See `Places`."""
        inside = (keys >= 0) & (keys < len(self._there))
        at = np.where(inside, keys, 0)
        return np.where(inside & self._there[at], at, -1)

    def items(self) -> tuple[Ids, Ids]:
        """See `Places`."""
        rows = np.flatnonzero(self._there)
        return rows, rows


@dataclass(frozen=True, eq=False)
class _Table:
    """A table by row number, and which rows there are: deleted ones, and those that never were, are not."""

    rows: Values
    there: Mask

    @classmethod
    def with_room(cls, table: TableSpec, held: "_Table | None") -> "_Table":
        """Room for all rows of a table, of which some are held already."""
        if held and len(held.rows) >= table.rows:
            return held
        larger = cls(np.zeros((table.rows, table.dim), table.dtype), np.zeros(table.rows, np.bool_))
        if held:
            larger.rows[: len(held.rows)], larger.there[: len(held.there)] = held.rows, held.there
        return larger

    def stage(self, rows: RowBatch) -> Callable[[], None]:
        put = staged_rows(self.rows, rows.ids, rows.values)

        def write() -> None:
            put()
            self.there[rows.ids] = not rows.deleted

        return write


@dataclass(frozen=True, eq=False)
class _IndexChange:
    """What a release changes of an index: the keys that it takes away, and those that it gives to rows."""

    index: KeyIndex
    erased: Ids
    keys: Ids
    rows: Ids

    def make(self) -> None:
        self.index.remove(self.erased)
        self.index.put(self.keys, self.rows)


class _KeyedCopy:
    """The tables of a model by row number, and beside each map of raw ids an index from them to rows.

    Attributes:
        tables: by name, to be looked up: by raw id where the table has a map, else by row number.
    """

    def __init__(self) -> None:
        self.tables: dict[str, KeyedRows] = {}
        self._held: dict[str, _Table] = {}
        self._indices: dict[str, KeyIndex] = {}

    def stage(self, release: Release) -> Callable[[], None]:
        """Prepare a release while others read, and return what writes it.

        Raises:
            Contradiction: two rows would have one raw id, or a table has no such rows; nothing was written.
        """
        held = {table.name: _Table.with_room(table, self._kept(table, release)) for table in release.tables}
        puts = [(rows.table.name, held[rows.table.name].stage(rows)) for rows in release.rows]
        fresh = {name for name, table in held.items() if table is not self._held.get(name)}
        maps = maps_of(release.tables)
        changes = {
            table.name: self._change(table, maps[table.name], held[table.name].there, release)
            for table in release.tables
            if table.name in maps
        }
        indices = {of: change.index for of, change in changes.items()}
        made = {of for of, index in indices.items() if index is not self._indices.get(of)}
        before = dict(self.tables)  # Kept until all is written: to free them takes time, too.
        places: dict[str, Places] = {name: _RowNumbers(table.there) for name, table in held.items()}
        places.update(indices)
        tables = {name: KeyedRows(places[name], table.rows) for name, table in held.items()}

        def put(*, unread: bool) -> None:
            for name, put_rows in puts:
                if (name in fresh) is unread:
                    put_rows()
            for of, change in changes.items():
                if (of in made) is unread:
                    change.make()

        def write() -> None:
            put(unread=False)
            self._held, self._indices = held, indices
            for name in before.keys() - tables.keys():
                del self.tables[name]
            self.tables.update(tables)

        put(unread=True)  # What nobody reads yet.
        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table by row number; zeros for those that it has grown by since the last release."""
        held = self._of(table)
        return None if held is None else rows_at(held.rows, ids)

    def _kept(self, table: TableSpec, release: Release) -> _Table | None:
        """What stays of a table."""
        return None if release.resets(table) else self._of(table)

    def _of(self, table: TableSpec) -> _Table | None:
        """What is held of a table, if it is held in that form: a policy may have come to send another."""
        held = self._held.get(table.name)
        return held if held and (held.rows.shape[1], held.rows.dtype) == (table.dim, table.dtype) else None

    def _change(self, table: TableSpec, id_map: TableSpec, there: Mask, release: Release) -> _IndexChange:
        """What changes of a table's index: of a new one where the table or its map begins anew."""
        stays = all(self._kept(each, release) for each in (table, id_map))
        index = self._indices.get(table.name) if stays else None
        rows = [rows for rows in release.rows if rows.table.name == table.name]
        entries = [rows for rows in release.rows if rows.table.name == id_map.name]
        held = self._kept(id_map, release)
        touched = np.arange(id_map.rows) if index is None else ids_of(rows)
        change = RawIdChange.of(touched, entries, lambda rows: _entries(held, rows))
        if index is not None:
            _check_others(id_map.name, index, change)
        return _index_change(index, change, there, rows)


@dataclass(frozen=True, kw_only=True)
class KeyedReading(Reading):
    """A `Reading` of tables by key.

    Attributes:
        tables: by name.
    """

    tables: Mapping[str, KeyedRows]


class KeyedTarget(LocalTarget["_KeyedCopy", KeyedReading]):
    """Keeps every table as rows by key: by raw id where the model has a map of raw ids for it, else by row number.

    Deleted rows, and rows that no raw id has, cannot be looked up. Behind the keys lie rows by number, so that
    checksums can show that they are the right ones. Tables that are no longer followed are dropped.
    """

    def __init__(self, *, reads: Reads = "pause") -> None:
        """Start with no tables.

        Args:
            reads: as of a `NumpyTarget`.

        Raises:
            InvalidInput: `reads` is something else.
        """
        copies = [_KeyedCopy() for _ in range(number_of_copies(reads))]
        super().__init__(reads, [(each, KeyedReading(tables=each.tables)) for each in copies])


def _entries(id_map: _Table | None, rows: Ids) -> Entries:
    """The entries of some rows in a map, zeros where it has none."""
    entries = np.zeros(len(rows), np.int64)
    if id_map:
        inside = rows < len(id_map.rows)
        entries[inside] = id_map.rows[rows[inside], 0]
    return entries


def _check_others(table: str, index: KeyIndex, change: RawIdChange) -> None:
    """Check that no row that a release does not touch has one of the raw ids that it gives."""
    named, raw_ids = named_raw_ids(change.after)
    owners = index.find(raw_ids)
    foreign = np.flatnonzero((owners >= 0) & ~np.isin(owners, change.rows))
    if len(foreign):
        at = foreign[0]
        raise two_rows(table, int(raw_ids[at]), [int(owners[at]), int(change.rows[named][at])])


def _index_change(
    index: KeyIndex | None, change: RawIdChange, there: Mask, rows: Sequence[RowBatch]
) -> _IndexChange:
    """The keys of the rows that change; `there` says which rows there are before the release brings `rows`."""
    before, after = there[change.rows], there[change.rows]
    for each in rows:
        after[change.at(each.ids)] = not each.deleted
    before &= (change.before != 0) & (index is not None)
    after &= change.after != 0
    changed = (before != after) | (change.before != change.after)
    erased, given = before & changed, after & changed
    keys = raw_ids_of(change.after[given])
    # A larger one is made now, while others read.
    index = (KeyIndex() if index is None else index).with_room(len(keys))
    return _IndexChange(index, raw_ids_of(change.before[erased]), keys, change.rows[given])
