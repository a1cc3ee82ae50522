"""The target for a Redis or Valkey server, and lookups of the rows that it writes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.client.targets.keyed_table import checked_keys
from deltasync.client.targets.keyed_target import Entries, RawIdChange, ids_of, maps_of, named_raw_ids
from deltasync.client.targets.redis_layout import Meta, Names, StoredTable, key_fields, keys_of, row_values
from deltasync.client.targets.redis_store import RedisStore, RedisWriter, place_of
from deltasync.client.targets.target import Reading, Release, reading_fields
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Mask, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec, raw_ids_of

if TYPE_CHECKING:
    import redis

__all__ = ["RedisRows", "RedisTarget"]
logger = logging.getLogger(__name__)
_BLOCK_ROWS = 8192
_NO_ROW = b""


class RedisTarget:
    """Writes a model into hashes of a Redis or Valkey server: rows by raw id, or by row number without a map.

    The target writes the version after the rows, so readers of a version find rows of that version or newer. To
    continue from an earlier target that has ended or was killed, use `SubscriberOptions(held=target.position)`.

    Attributes:
        position: the position of the rows in the store.
    """

    def __init__(self, client: "redis.Redis", prefix: str, *, retry_seconds: float = 30.0) -> None:
        """Write under a prefix.

        Args:
            client: a client of one server, without `decode_responses`. You may share it with other code.
            prefix: the prefix of all keys, before a colon. Use each prefix for one model and one target only.
            retry_seconds: how long to retry commands while the server cannot be reached.

        Raises:
            InvalidInput: the prefix is empty, or the client has `decode_responses`.
            Contradiction: there is data under the prefix that this version cannot read, or the server may evict
                rows.
            ServiceUnavailable: the server cannot be reached.
            StorageFailed: the server refuses a command.
        """
        if not prefix:
            raise InvalidInput("prefix: empty, expected a prefix that no other keys of the store have")
        self._names = Names(prefix)
        self._where = f"the store at {place_of(client)}, prefix {prefix!r},"
        self._store = RedisWriter(client, retry_seconds, self._names.meta, self._where)
        self._refuse_eviction()
        meta = self._meta(self._store.fields(self._names.meta))
        self.position = self._ending = meta.position if meta else Position()

    def apply(self, release: Release) -> None:
        """Write a release, its version last. After an error, write the same release again, or a later one.

        Raises:
            Contradiction: the store has rows of another model or in another form; another writer has changed or
                emptied it; the server has lost changes; two rows would get the same raw id; or the consumer's mode
                is `ids`.
            ServiceUnavailable: the server cannot be reached.
            StorageFailed: the server refuses a command, for example because its memory is full.
        """
        release.check_values()
        maps = maps_of(release.tables)
        tables = tuple(StoredTable.of_spec(table, mapped=table.name in maps) for table in release.tables)
        begun, interrupted = self._begin(release, tables)
        self._write(release, maps, interrupted=interrupted)
        self._ending = release.position
        gone = sorted({table.name for table in begun.tables} - {table.name for table in tables})
        names = [name for table in gone for name in (self._names.rows(table), self._names.free(table))]
        self._store.exchange(
            lambda _: begun.after(release, tables).fields(), [["UNLINK", *names]] if names else []
        )
        self.position = release.position

    def _begin(self, release: Release, tables: tuple[StoredTable, ...]) -> tuple[Meta, bool]:
        """Mark the release as being written.

        Returns the new `meta`, and whether an earlier release was only partly written.
        """
        states = list[Meta]()

        def begin(fields: Mapping[bytes, bytes]) -> dict[str, str]:
            stored = self._meta(fields)
            self._check(stored, release, tables)
            stored = stored or Meta(release.model, ())
            states.extend([stored, stored.begun(release, tables)])
            return states[-1].fields()

        self._store.exchange(begin)
        self.position = self._ending = states[-1].position
        return states[-1], any(state.writing for state in states[:-1])

    def _write(self, release: Release, maps: Mapping[str, TableSpec], *, interrupted: bool) -> None:
        rows: dict[str, list[RowBatch]] = {table.name: [] for table in release.tables}
        for each in release.rows:
            rows[each.table.name].append(each)
        for table in release.tables:
            if id_map := maps.get(table.name):
                MappedTable(self._store, self._names, table, id_map).write(
                    rows[table.name],
                    rows[id_map.name],
                    reset=release.resets(table),
                    reset_map=release.resets(id_map),
                    interrupted=interrupted,
                )
            elif table.kind is not TableKind.ID_MAP or table.of not in rows:
                write_rows(
                    self._store, self._names.rows(table.name), rows[table.name], reset=release.resets(table)
                )

    def _refuse_eviction(self) -> None:
        policy, limit = self._store.setting("maxmemory-policy"), self._store.setting("maxmemory")
        if policy is None:
            logger.warning("%s does not reveal its maxmemory-policy: make sure it evicts no rows", self._where)
        elif policy.startswith("allkeys") and limit != "0":
            raise Contradiction(
                f"{self._where} evicts keys when its memory is full (maxmemory {limit}, policy {policy}), which "
                "loses rows without an error. Set maxmemory-policy to noeviction, or to one of volatile-*"
            )

    def _meta(self, fields: Mapping[bytes, bytes]) -> Meta | None:
        return Meta.of_fields(fields, self._where)

    def _check(self, meta: Meta | None, release: Release, tables: tuple[StoredTable, ...]) -> None:
        """Check that a release can be written to the store."""
        position = meta.position if meta else Position()
        # `_ending`: the answer at the end of the last release may have been lost.
        expected = position.number and position in (self.position, self._ending)
        if not release.resync and not expected:
            raise Contradiction(
                f"{self._where} has {_text(position)}, expected {_text(self.position)}: another program has "
                "written to it or restored a copy, or the subscriber was started without held=target.position"
            )
        hint = "use another prefix, or delete the keys of this one"
        if meta and meta.model != release.model:
            raise Contradiction(
                f"{self._where} has rows of model {meta.model!r}, the consumer follows {release.model!r}: {hint}"
            )
        for stored, sent in ((s, t) for s in (meta.tables if meta else ()) for t in tables if s.name == t.name):
            if replace(stored, rows=sent.rows) != sent:
                text = f"table {sent.name!r} in {self._where} is {stored}, the consumer sends {sent}: {hint}"
                raise Contradiction(text)


class RedisRows:
    """Looks up the rows that a `RedisTarget` writes under a prefix."""

    def __init__(self, client: "redis.Redis", prefix: str, *, retry_seconds: float = 0.0) -> None:
        """Read under a prefix; see `RedisTarget` for arguments and errors."""
        self._store, self._names = RedisStore(client, retry_seconds), Names(prefix)
        self._where = f"the store at {place_of(client)}, prefix {prefix!r},"
        self._tables: dict[str, StoredTable] = {}

    def newest(self) -> Reading:
        """The store's version. Later lookups return rows of this version or newer.

        Raises:
            NotFound: the store has no version yet.
        """
        return Reading(**reading_fields(self._meta()))

    def lookup(self, table: str, keys: Ids) -> tuple[Values, Mask]:
        """Look up rows of a table.

        Args:
            table: its name.
            keys: int64 [n], in any order: raw ids if the table has a map, else row numbers.

        Returns:
            The rows, [n, dim], zeros for missing keys; and a mask of the existing keys, bool [n].

        Raises:
            NotFound: the store has no such table, or no version yet.
            Contradiction: rows do not have the form that the store declares.
            InvalidInput: keys of another type or shape.
        """
        stored = self._table(table)
        rows = self._store.get(self._names.rows(table), key_fields(checked_keys(keys)))
        sizes = [len(row) for row in rows if row is not None]
        if any(size != stored.row_bytes for size in sizes) or not sizes:
            # The prefix may have been emptied, and written again in another form.
            stored = self._table(table, again=True)
        if wrong := next((size for size in sizes if size != stored.row_bytes), None):
            raise Contradiction(f"{self._where} has a row of {wrong} bytes in table {table!r}, which is {stored}")
        return stored.values(rows), np.array([row is not None for row in rows], np.bool_)

    def _table(self, name: str, *, again: bool = False) -> StoredTable:
        if again or name not in self._tables:
            self._tables = {table.name: table for table in self._meta().tables}
        if name not in self._tables:
            raise NotFound(f"{self._where} has no table {name!r}; tables: {', '.join(self._tables)}")
        return self._tables[name]

    def _meta(self) -> Meta:
        meta = Meta.of_fields(self._store.fields(self._names.meta), self._where)
        if meta is None or meta.step is None:
            raise NotFound(f"{self._where} has no version yet: start a subscriber with a RedisTarget on it")
        return meta


def _text(position: Position) -> str:
    return f"number {position.number} of history {position.history}" if position.number else "no position"


class MappedTable:
    """A table with each row in one of two hashes: under its raw id, or under its row number if it has none."""

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
        """Write a release's rows of the table and entries of the map; a reset deletes all others.

        `interrupted`: an earlier release was only partly written. If two rows would get one raw id, it writes
        nothing and raises Contradiction.
        """
        changed = [self._freed(), *entries] if reset_map else entries
        change = RawIdChange.of(ids_of(rows), changed, self._entries)
        brought, deleted = (ids_of(each for each in rows if each.deleted == gone) for gone in (False, True))
        moving = np.isin(change.rows, np.concatenate([brought, deleted]), invert=True)
        if not interrupted:  # Otherwise a row may still be under its number although its raw id is the same.
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
        """All entries of the map, set to free."""
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *map(keys_of, self._store.scan(self._map))]))
        return RowBatch.of_table(self._spec, rows, np.zeros((len(rows), 1), np.int64))

    def _entries(self, rows: Ids) -> Entries:
        entries = np.empty(len(rows), np.int64)
        for at in range(0, len(rows), _BLOCK_ROWS):
            block = self._store.get(self._map, key_fields(rows[at : at + _BLOCK_ROWS]))
            entries[at : at + _BLOCK_ROWS] = keys_of(bytes(8) if entry is None else entry for entry in block)
        return entries

    def _parked(self, change: RawIdChange, moving: Mask) -> list[bytes]:
        """Copy rows whose raw ids change to their row numbers, because other rows may get these raw ids.

        Returns the values of these rows, because the release does not contain them.
        """
        rows, before = change.rows[moving], change.before[moving]
        values = self._store.get(self._free, key_fields(rows))
        lacking = np.array([value is None for value in values], np.bool_)
        named = lacking & (before != 0)
        under = self._store.get(self._rows, key_fields(raw_ids_of(before[named])))
        by_row = dict(zip(rows[named].tolist(), under, strict=True))
        parked = [
            (by_row.get(row) or _NO_ROW) if value is None else value
            for row, value in zip(rows.tolist(), values, strict=True)
        ]
        self._store.put(
            self._free, key_fields(rows[lacking]), [parked[at] for at in np.flatnonzero(lacking).tolist()]
        )
        return parked

    def _put(self, entries: Entries, rows: Ids, values: Sequence[bytes]) -> None:
        """Write rows under the raw ids in their map entries, or under their numbers if they have none."""
        named, raw_ids = named_raw_ids(entries)
        self._store.put(self._rows, key_fields(raw_ids), _some(values, named))
        self._store.put(self._free, key_fields(rows[~named]), _some(values, ~named))

    def _drop(self, name: str, keys: Ids) -> None:
        self._store.drop(name, key_fields(keys))

    def _clean(self, change: RawIdChange, brought: Ids, *, reset: bool, interrupted: bool) -> None:
        """After a reset or an interruption, search the hashes for keys without a row, and delete them."""
        if reset:
            named, raw_ids = named_raw_ids(change.after[change.at(brought)])
            _sweep(self._store, self._rows, raw_ids)
            _sweep(self._store, self._free, brought[~named])
        elif interrupted:
            entries = [keys_of(fields.values()) for fields in self._store.scan(self._map)]
            _drop_others(self._store, self._rows, named_raw_ids(np.concatenate(entries))[1])
            for fields in self._store.scan(self._free):
                self._store.drop(self._free, [row for row, value in fields.items() if value == _NO_ROW])


def write_rows(store: RedisWriter, name: str, rows: Sequence[RowBatch], *, reset: bool) -> None:
    """Write or delete rows by number. A reset then deletes all other rows."""
    for block in chain.from_iterable(each.blocks(_BLOCK_ROWS) for each in rows):
        if block.deleted:
            store.drop(name, key_fields(block.ids))
        else:
            store.put(name, key_fields(block.ids), row_values(block.values))
    if reset:
        _sweep(store, name, ids_of(each for each in rows if not each.deleted))


def _sweep(store: RedisWriter, name: str, keys: Ids) -> None:
    """Remove all fields of a hash except `keys`, which all exist."""
    if store.size(name) > len(keys):
        _drop_others(store, name, keys)


def _drop_others(store: RedisWriter, name: str, keys: Ids) -> None:
    kept = np.sort(keys)
    for fields in store.scan(name):
        store.drop(name, key_fields(_others(keys_of(fields), kept)))


def _others(keys: Ids, kept: Ids) -> Ids:
    """The keys that are not in `kept`, which is sorted."""
    at = np.searchsorted(kept, keys)
    others: Mask = at == len(kept)
    others[~others] = kept[at[~others]] != keys[~others]
    result: Ids = keys[others]
    return result


def _some(values: Sequence[bytes], which: Mask) -> list[bytes]:
    return [values[at] for at in np.flatnonzero(which).tolist()]
