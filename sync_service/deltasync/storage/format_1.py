"""Data directories of format 1, which had no number: they are brought to format 2 when they are opened.

Format 1 was three databases of LMDB:

    parts   model, 0, version, rank, number          ->  checksum of the payload + payload
            "view/" + consumer, 0, release, slot, number  ->  the same
    seals   model, 0, version                        ->  JSON
    meta    name                                     ->  JSON

Record 0 of a part was the message with which its rank had opened its stream, the others were rows of its shards:
slot, count, ids, values. Rows of a view were count, ids, values and, in mode `ids`, norms.

The small records go first, in one transaction that also writes the format's number: from there on an older service
fails at the first of them. Then the rest is moved, a few records at a time, and is deleted where it was in the
same transaction: whenever that is cut short, the next start goes on with what is left.

In format 2 the name `parts` is taken by a key, so that an older service fails at it even where there is no small
record yet: it would write its own between those of format 2.
"""

import logging
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lmdb
import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.storage.lmdb_records import address_of, damaged, key_of, with_checksum, without_checksum
from deltasync.storage.log_store import Buffer
from deltasync.storage.records import (
    NORMS,
    VALUES,
    layout_number,
    name_of,
    pack_json,
    pack_layout,
    reading,
    rows_header,
    seal_of_record,
    seal_record,
    unpack_json,
)
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import shards_from_open, table_from_message

logger = logging.getLogger(__name__)

_MOVED_BYTES = 1 << 20  # Of records that are moved in one transaction.
_CHECKSUM_BYTES = 8
_INDEX_BYTES = 4
_VERSION = struct.Struct(">Q")
_PART = struct.Struct("<QQ")  # Slot and count.
_VIEW = struct.Struct("<Q")  # Count.
_FORMAT = b"format"
_PARTS = b"parts"

Move = Callable[[lmdb.Transaction, bytes, bytes], None]


def migrate(env: lmdb.Environment, max_bytes: int) -> None:
    """Bring a log to format 2, if it is in format 1.

    Raises:
        StorageFailed: a record is damaged, or the disk is full; the next call goes on from there.
    """
    started = time.monotonic()
    try:
        parts = env.open_db(_PARTS, create=False)
    except lmdb.IncompatibleError:
        return
    except lmdb.NotFoundError:
        with _transaction(env) as txn:
            _take_name(txn)
        return
    try:
        # A record needs room where it goes before the room it had can be used again.
        env.set_mapsize(2 * max_bytes)
        moved = _Migration(env, parts).run()
        env.set_mapsize(max_bytes)
    except lmdb.Error as error:
        raise StorageFailed(
            f"the log could not be brought to format 2 ({error}): make room on the disk and start the service "
            "again; nothing was lost"
        ) from error
    if moved:
        seconds = time.monotonic() - started
        logger.info("log brought from format 1 to format 2: records=%d seconds=%.2f", moved, seconds)


class _Migration:
    """One run of it, over as many records as there are left."""

    def __init__(self, env: lmdb.Environment, parts: Any) -> None:
        self._env = env
        self._parts = parts
        self._seals, self._meta, self._records = (env.open_db(name) for name in (b"seals", b"meta", b"records"))
        self._moved = 0
        self._small: dict[str, Any] = {}
        self._part = b""  # What the keys of the part's records begin with.
        self._layout = 0  # The part's.

    def run(self) -> int:
        """Move everything; how many records that were."""
        self._move_small()
        self._move_all(self._parts, self._move_part)
        self._move_all(self._seals, self._move_seal)
        with _transaction(self._env) as txn:
            txn.drop(self._parts)
            txn.drop(self._seals)
            _take_name(txn)
        return self._moved

    def _move_small(self) -> None:
        with _transaction(self._env) as txn:
            begun = txn.get(_FORMAT, db=self._meta) is not None
            for key, value in [(bytes(key), bytes(value)) for key, value in txn.cursor(self._meta)]:
                name = key.decode(errors="replace")
                with reading(f"record {name}"):
                    self._small[name] = unpack_json(
                        without_checksum(key, value, f"record {name}") if begun else value
                    )
                    if not begun and name.startswith("model/"):
                        self._correct_flushed(txn, name.removeprefix("model/"), self._small[name])
                if not begun:
                    self._put(txn, key, pack_json(self._small[name]), database=self._meta)
            if not begun:
                self._put(txn, _FORMAT, b"2", database=self._meta)

    def _correct_flushed(self, txn: lmdb.Transaction, model: str, record: dict[str, Any]) -> None:
        """A table that was added during a flush wrote down the flush before; the log may have been cut since."""
        newest = self._newest_seal(txn, model)
        with txn.cursor(self._parts) as cursor:
            found = cursor.set_range(key_of(model, record["flushed"] + 1, 0, 0))
            name, version, *_ = address_of(bytes(cursor.key())) if found else ("", 0)
        record["flushed"] = max(record["flushed"], min(version - 1, newest) if name == model else newest)

    def _move_all(self, database: Any, move: Move) -> None:
        """Move what is in a database, in its order."""
        start: bytes | None = b"\0"
        while start is not None:
            with _transaction(self._env) as txn:
                start = self._move_some(txn, database, move, start)

    def _move_some(self, txn: lmdb.Transaction, database: Any, move: Move, start: bytes) -> bytes | None:
        """Move so many bytes, from a key on; the key to go on with, or None once there is no more."""
        size = 0
        while size < _MOVED_BYTES:
            with txn.cursor(database) as cursor:
                if not cursor.set_range(start):
                    return None
                key, value = bytes(cursor.key()), bytes(cursor.value())
            move(txn, key, value)
            size += len(value)
            start = key + b"\0"
        return start

    def _move_part(self, txn: lmdb.Transaction, key: bytes, value: bytes) -> None:
        """Move a record of rows, or leave it out if nobody would read it any more."""
        name, number, part, index = address_of(key)
        kind, _, owner = name.rpartition("/")
        stream = f"{'releases' if kind else 'cuts'}/{owner}"
        payload = _checked(value, name_of(stream, number, part, index))
        if kind and self._is_read(name, number):
            header = self._view_header(name, part, payload)
            self._put(txn, key_of(stream, number, part, index), header, payload[_VIEW.size :])
        elif not kind and self._is_read(f"model/{name}", number) and number <= self._newest_seal(txn, name):
            if index == 0:
                self._begin_part(txn, key, name, payload)
                return  # It stays until the next part: what is left of its own would be without it.
            if key[:-_INDEX_BYTES] != self._part:
                raise damaged(name_of(stream, number, part, 0))
            slot, count = _PART.unpack_from(payload)
            header = rows_header(slot, count, self._layout, VALUES)
            self._put(txn, key_of(stream, number, part, index), header, payload[_PART.size :])
        txn.delete(key, db=self._parts)

    def _begin_part(self, txn: lmdb.Transaction, key: bytes, model: str, payload: memoryview) -> None:
        """Write the layout of a part, unless it is there."""
        opening = publish_pb2.PublishOpen.FromString(bytes(payload))
        tables = [table_from_message(table) for table in opening.tables]
        layout = pack_layout(tables, shards_from_open(opening, tables))
        if self._part:
            txn.delete(self._part + bytes(_INDEX_BYTES), db=self._parts)
        self._part, self._layout = key[:-_INDEX_BYTES], layout_number(layout)
        new_key = key_of(f"layouts/{model}", self._layout, 0, 0)
        if txn.get(new_key, db=self._records) is None:
            self._put(txn, new_key, layout)

    def _move_seal(self, txn: lmdb.Transaction, key: bytes, value: bytes) -> None:
        model, version = (
            key[: -_VERSION.size - 1].decode(errors="replace"),
            *_VERSION.unpack(key[-_VERSION.size :]),
        )
        with reading(name_of(f"seals/{model}", version)):
            seal = seal_of_record(unpack_json(value))
        self._put(txn, key_of(f"seals/{model}", version, 0, 0), pack_json(seal_record(seal)))
        txn.delete(key, db=self._seals)

    def _newest_seal(self, txn: lmdb.Transaction, model: str) -> int:
        """The version of a model's newest seal; 0 = there is none."""
        prefix = model.encode() + b"\0"
        with txn.cursor(self._seals) as cursor:
            more = cursor.prev() if cursor.set_range(prefix + b"\xff" * _VERSION.size) else cursor.last()
            if not more or not bytes(cursor.key()).startswith(prefix):
                return 0
            (version,) = _VERSION.unpack(cursor.key()[len(prefix) :])
            return int(version)

    def _put(self, txn: lmdb.Transaction, key: bytes, *payload: Buffer, database: Any = None) -> None:
        txn.put(key, with_checksum(key, *payload), db=database or self._records)
        self._moved += 1

    def _is_read(self, name: str, number: int) -> bool:
        with reading(f"record {name}"):
            return name in self._small and number > self._small[name]["flushed"]

    def _view_header(self, view: str, slot: int, payload: memoryview) -> bytes:
        with reading(f"record {view}"):
            norms = self._small[view]["tables"][slot]["mode"] == "ids"
        return rows_header(slot, _VIEW.unpack_from(payload)[0], 0, VALUES | NORMS * norms)


@contextmanager
def _transaction(env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
    with env.begin(write=True) as txn:
        yield txn


def _take_name(txn: lmdb.Transaction) -> None:
    txn.put(_PARTS, b"")  # No database can have it now.


def _checked(value: bytes, name: str) -> memoryview:
    payload = memoryview(value)[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(payload) != value[:_CHECKSUM_BYTES]:
        raise damaged(name)
    return payload
