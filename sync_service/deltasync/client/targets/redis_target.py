"""Rows in the hashes of a Redis or Valkey server."""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.client.targets.keyed_target import Entries, RawIdChange, ids_of, maps_of, named_raw_ids
from deltasync.client.targets.redis_layout import Meta, Names, StoredTable, key_fields, keys_of, row_values
from deltasync.client.targets.redis_store import RedisWriter, place_of
from deltasync.client.targets.target import Release
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Mask, RowBatch
from deltasync.core.tables import TableKind, TableSpec, raw_ids_of

if TYPE_CHECKING:
    import redis

__all__ = ["RedisTarget"]
logger = logging.getLogger(__name__)
_BLOCK_ROWS = 8192
_NO_ROW = b""


class RedisTarget:
    """Writes a model into hashes of a Redis or Valkey server: rows by raw id, or by number where there is no map.

    The version is written after all rows are: a reader that has read it finds rows of it, or newer ones. A target
    that begins where another has ended, or was killed, goes on from it: `SubscriberOptions(held=target.position)`.

    Attributes:
        position: what the store holds, as it says itself.
    """

    def __init__(self, client: "redis.Redis", prefix: str, *, retry_seconds: float = 30.0) -> None:
        """Write under a prefix.

        Args:
            client: of one server, without `decode_responses`; it may be used for other things, too.
            prefix: what the names of all keys begin with, before a colon. One model and one target have it alone.
            retry_seconds: how long a command is tried again while the server cannot be reached.

        Raises:
            InvalidInput: an empty prefix, or a client that decodes what it reads.
            Contradiction: under the prefix lies what this version cannot read, or the server may evict rows.
            ServiceUnavailable: the server cannot be reached.
            StorageFailed: it refuses.
        """
        if not prefix:
            raise InvalidInput("prefix: empty, expected one that no other keys of the store begin with")
        self._names = Names(prefix)
        self._where = f"the store at {place_of(client)}, prefix {prefix!r},"
        self._store = RedisWriter(client, retry_seconds, self._names.meta, self._where)
        self._refuse_eviction()
        meta = self._meta(self._store.fields(self._names.meta))
        self.position = self._ending = meta.position if meta else Position()

    def apply(self, release: Release) -> None:
        """Write a release, its version last. After an error the same or a later release can be written again.

        Raises:
            Contradiction: the store has rows of another model, or of tables that lie otherwise; somebody else has
                written there, or emptied it, or the server has lost changes; two rows would have one raw id; or
                the consumer streams ids only.
            ServiceUnavailable: the server cannot be reached.
            StorageFailed: it refuses: its memory is full, say.
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
        """Say in the store that this target writes: what it says now, and whether a release may lie there half."""
        states = list[Meta]()

        def begin(found: Mapping[bytes, bytes]) -> dict[str, str]:
            held = self._meta(found)
            self._check(held, release, tables)
            held = held or Meta(release.model, ())
            states.extend([held, held.begun(release, tables)])
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
            logger.warning("%s does not tell its maxmemory-policy: see that it evicts no rows", self._where)
        elif policy.startswith("allkeys") and limit != "0":
            raise Contradiction(
                f"{self._where} evicts keys when its memory is full (maxmemory {limit}, policy {policy}): "
                "tables would be lost unseen. Set maxmemory-policy to noeviction, or to one of volatile-*"
            )

    def _meta(self, found: Mapping[bytes, bytes]) -> Meta | None:
        return Meta.of_fields(found, self._where)

    def _check(self, held: Meta | None, release: Release, tables: tuple[StoredTable, ...]) -> None:
        """Check that a release may be written to what is held."""
        position = held.position if held else Position()
        # The answer may have been lost when a release ended.
        expected = position.number and position in (self.position, self._ending)
        if not release.resync and not expected:
            raise Contradiction(
                f"{self._where} holds {_text(position)}, expected {_text(self.position)}: something else has "
                "written there or brought back a copy, or the subscriber began without held=target.position"
            )
        hint = "use another prefix, or delete the keys of this one"
        if held and held.model != release.model:
            raise Contradiction(
                f"{self._where} has rows of model {held.model!r}, the consumer follows {release.model!r}: {hint}"
            )
        for stored, sent in ((s, t) for s in (held.tables if held else ()) for t in tables if s.name == t.name):
            if not stored.lies_as(sent):
                text = f"table {sent.name!r} in {self._where} is {stored}, the consumer sends {sent}: {hint}"
                raise Contradiction(text)


def _text(position: Position) -> str:
    return f"number {position.number} of history {position.history}" if position.number else "nothing"


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


def write_rows(store: RedisWriter, name: str, rows: Sequence[RowBatch], *, reset: bool) -> None:
    """Write rows by number, or delete them; then, on a reset, remove what the release has not brought."""
    for block in chain.from_iterable(each.blocks(_BLOCK_ROWS) for each in rows):
        if block.deleted:
            store.drop(name, key_fields(block.ids))
        else:
            store.put(name, key_fields(block.ids), row_values(block.values))
    if reset:
        _sweep(store, name, ids_of(each for each in rows if not each.deleted))


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


def _some(values: Sequence[bytes], which: Mask) -> list[bytes]:
    return [values[at] for at in np.flatnonzero(which).tolist()]
