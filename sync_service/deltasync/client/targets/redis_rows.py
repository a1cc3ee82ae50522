"""Look up rows that a `RedisTarget` writes."""

from typing import TYPE_CHECKING

import numpy as np

from deltasync.base.errors import Contradiction, NotFound
from deltasync.client.targets.keyed_table import checked_keys
from deltasync.client.targets.redis_layout import Meta, Names, StoredTable, key_fields
from deltasync.client.targets.redis_store import RedisStore, place_of
from deltasync.client.targets.target import Reading
from deltasync.core.rows import Ids, Mask, Values

if TYPE_CHECKING:
    import redis


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
        meta = self._meta()
        return Reading(
            position=meta.position,
            version=meta.version,
            step=meta.step,
            step_end_unix_ns=meta.step_end_unix_ns,
            event_time_unix_ns=meta.event_time_unix_ns,
            kept=meta.kept,
        )

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
