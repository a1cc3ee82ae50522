"""The rows of a release into hashes: rows by number, and rows by raw id.

A process may end between any two commands, and the next one is given the same changes again, with later ones: what
is needed then is never overwritten or deleted before.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from deltasync.client.keyed.raw_ids import Entries, RawIdChange, ids_of, named_raw_ids
from deltasync.client.keyed.redis_layout import Names, key_fields, keys_of, row_values
from deltasync.client.keyed.redis_store import RedisWriter
from deltasync.core.raw_ids import raw_ids_of
from deltasync.core.rows import Ids, Mask, RowBatch
from deltasync.core.tables import TableSpec

_BLOCK_ROWS = 8192
_NO_ROW = b""


def write_rows(store: RedisWriter, name: str, rows: Sequence[RowBatch], *, reset: bool) -> None:
    """Write rows by number, or delete them; then, on a reset, remove what the release has not brought."""
    for block in chain.from_iterable(each.blocks(_BLOCK_ROWS) for each in rows):
        if block.deleted:
            store.drop(name, key_fields(block.ids))
        else:
            store.put(name, key_fields(block.ids), row_values(block.values))
    if reset:
        _sweep(store, name, ids_of(each for each in rows if not each.deleted))


class MappedTable:
    """A table whose rows are named by raw ids.

    A row lies in one of two hashes: under its raw id, or under its number while it has none.
    """

    def __init__(self, store: RedisWriter, names: Names, table: TableSpec, id_map: TableSpec) -> None:
        self._store = store
        self._rows, self._free, self._map = names.rows(table.name), names.free(table.name), names.rows(id_map.name)
        self._spec = id_map

    def write(
        self,
        rows: Sequence[RowBatch],
        entries: Sequence[RowBatch],
        *,
        reset: bool,
        reset_map: bool,
        interrupted: bool,
    ) -> None:
        """Write a release.

        Args:
            rows: what it brings of the table.
            entries: what it brings of the map.
            reset: whether all other rows are no more.
            reset_map: whether all other rows have no raw id.
            interrupted: whether an earlier release was not written to its end.

        Raises:
            Contradiction: two rows would have one raw id; nothing was written.
        """
        changed = [self._freed(), *entries] if reset_map else entries
        change = RawIdChange.of(ids_of(rows), changed, self._entries)
        brought, deleted = (ids_of(each for each in rows if each.deleted == gone) for gone in (False, True))
        moving = np.isin(change.rows, np.concatenate([brought, deleted]), invert=True)
        if not interrupted:  # Else what has its raw id again may lie under its number.
            moving &= change.before != change.after
        values = [_NO_ROW] * int(moving.sum()) if reset else self._parked(change, moving)
        dead = np.isin(change.rows, deleted)
        dead[moving] = [not value for value in values]
        for block in chain.from_iterable(each.blocks(_BLOCK_ROWS) for each in rows if not each.deleted):
            self._put(change.after[change.at(block.ids)], block.ids, row_values(block.values))
        self._put(change.after[moving & ~dead], change.rows[moving & ~dead], [value for value in values if value])
        self._drop(self._rows, change.erased)
        self._drop(self._rows, named_raw_ids(change.after[dead])[1])
        write_rows(self._store, self._map, entries, reset=reset_map)
        self._drop(self._free, change.rows[(change.after != 0) | dead])
        self._clean(change, brought, reset=reset, interrupted=interrupted)

    def _freed(self) -> RowBatch:
        """All entries of the map made free."""
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *map(keys_of, self._store.scan(self._map))]))
        return RowBatch.of_table(self._spec, rows, np.zeros((len(rows), 1), np.int64))

    def _entries(self, rows: Ids) -> Entries:
        entries = np.empty(len(rows), np.int64)
        for at in range(0, len(rows), _BLOCK_ROWS):
            found = self._store.get(self._map, key_fields(rows[at : at + _BLOCK_ROWS]))
            entries[at : at + _BLOCK_ROWS] = keys_of(bytes(8) if entry is None else entry for entry in found)
        return entries

    def _parked(self, change: RawIdChange, moving: Mask) -> list[bytes]:
        """The values of rows that get other raw ids and do not come themselves, which have been put under their
        numbers: their raw ids may soon be those of others."""
        rows, before = change.rows[moving], change.before[moving]
        values = self._store.get(self._free, key_fields(rows))
        lacking = np.array([value is None for value in values], np.bool_)
        named = lacking & (before != 0)
        under = self._store.get(self._rows, key_fields(raw_ids_of(before[named])))
        found = dict(zip(rows[named].tolist(), under, strict=True))
        parked = [
            (found.get(row) or _NO_ROW) if value is None else value
            for row, value in zip(rows.tolist(), values, strict=True)
        ]
        self._store.put(
            self._free, key_fields(rows[lacking]), [parked[at] for at in np.flatnonzero(lacking).tolist()]
        )
        return parked

    def _put(self, entries: Entries, rows: Ids, values: Sequence[bytes]) -> None:
        """Put rows with these entries under their raw ids, and those that have none under their numbers."""
        named, raw_ids = named_raw_ids(entries)
        self._store.put(self._rows, key_fields(raw_ids), _some(values, named))
        self._store.put(self._free, key_fields(rows[~named]), _some(values, ~named))

    def _drop(self, name: str, keys: Ids) -> None:
        self._store.drop(name, key_fields(keys))

    def _clean(self, change: RawIdChange, brought: Ids, *, reset: bool, interrupted: bool) -> None:
        """Remove what no row is any more, where it is not known what that could be."""
        if reset:
            named, raw_ids = named_raw_ids(change.after[change.at(brought)])
            _sweep(self._store, self._rows, raw_ids)
            _sweep(self._store, self._free, brought[~named])
        elif interrupted:
            entries = [keys_of(found.values()) for found in self._store.scan(self._map)]
            _drop_others(self._store, self._rows, named_raw_ids(np.concatenate(entries))[1])
            for found in self._store.scan(self._free):
                self._store.drop(self._free, [row for row, value in found.items() if value == _NO_ROW])


def _some(values: Sequence[bytes], which: Mask) -> list[bytes]:
    return [values[at] for at in np.flatnonzero(which).tolist()]


def _sweep(store: RedisWriter, name: str, keys: Ids) -> None:
    """Remove all fields of a hash but these, which are all there."""
    if store.size(name) > len(keys):
        _drop_others(store, name, keys)


def _drop_others(store: RedisWriter, name: str, keys: Ids) -> None:
    kept = np.sort(keys)
    for found in store.scan(name):
        store.drop(name, key_fields(_others(keys_of(found), kept)))


def _others(keys: Ids, kept: Ids) -> Ids:
    """The keys that are not among those that are kept, which are sorted."""
    at = np.searchsorted(kept, keys)
    others: Mask = at == len(kept)
    others[~others] = kept[at[~others]] != keys[~others]
    result: Ids = keys[others]
    return result
