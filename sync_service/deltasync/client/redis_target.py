"""Rows into the hashes of a Redis or Valkey server."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deltasync.client.keyed.raw_ids import maps_of
from deltasync.client.keyed.redis_layout import Meta, Names, StoredTable
from deltasync.client.keyed.redis_store import RedisWriter, place_of
from deltasync.client.keyed.redis_tables import MappedTable, write_rows
from deltasync.client.targets import Release
from deltasync.core.errors import Contradiction, InvalidInput
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.tables import TableKind, TableSpec

if TYPE_CHECKING:
    import redis

__all__ = ["RedisTarget"]

logger = logging.getLogger(__name__)


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
