"""The log: the truth everything else can be rebuilt from, in LMDB.

Records (keys are big-endian, so that LMDB's order is the log's order):

    parts   model, version, rank, number  ->  checksum + payload     rows of a cut, before and after its seal;
            view, release, slot, number   ->  checksum + payload     rows of a consumer's release
    seals   model, version                ->  JSON                   what makes a cut visible
    meta    text                          ->  JSON                   models, consumers, views, offsets

Parts whose version has no seal belong to a cut that was never finished; recovery drops them.
One thread writes; it commits all that has gathered since its last commit together (group commit).
"""

import json
import logging
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.core.seal import Seal
from deltasync.storage.records import seal_of_record, seal_record

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_COMMIT_OPERATIONS = 32  # Bounds what one transaction holds in memory: 32 chunks of at most 1 MiB.

Buffer = bytes | memoryview
Write = Callable[[lmdb.Transaction], None]


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Where the log is kept.

    Attributes:
        directory: folder of the log; made if missing.
        max_bytes: hard cap of the log's file, which grows only as needed.
    """

    directory: Path
    max_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        if self.max_bytes < 1 << 20:
            raise ValueError(f"max_bytes: {self.max_bytes}, expected at least 1 MiB")


def _key(model: str, version: int, *rest: int) -> bytes:
    return model.encode() + b"\0" + struct.pack(f">Q{len(rest)}I", version, *rest)


class Log:
    """An append-only log of cuts, with the small records that belong to them.

    Attributes:
        refusing: a write was refused for want of room; cleared once there is room again.
    """

    def __init__(self, options: LogOptions) -> None:
        options.directory.mkdir(parents=True, exist_ok=True)
        self._env = _open(options)
        self._full_bytes = options.max_bytes - _reserve(options.max_bytes)
        self.refusing = False
        self._parts = self._env.open_db(b"parts")
        self._seals = self._env.open_db(b"seals")
        self._meta = self._env.open_db(b"meta")
        self._queue: queue.SimpleQueue[tuple[Write, Future[None]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_loop, name="log-writer", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Commit what was submitted and close the files."""
        self._queue.put(None)
        self._writer.join()
        self._env.close()

    # Writing. Every method returns at once; its future is done when the record is on disk.

    def append(self, model: str, version: int, rank: int, number: int, *payload: Buffer) -> Future[None]:
        """Append record `number`, in pieces, of a rank's part of a cut that is not sealed yet."""
        checksum = xxhash.xxh3_64()
        for piece in payload:
            checksum.update(piece)
        record = b"".join((checksum.digest(), *payload))
        key = _key(model, version, rank, number)
        return self._submit(lambda txn: self._append(txn, key, record))

    def drop_part(self, model: str, version: int, rank: int) -> Future[None]:
        """Forget what was appended of a rank's part of a cut that is not sealed yet."""
        first, last = _key(model, version, rank), _key(model, version, rank, 2**32 - 1)
        return self._submit(lambda txn: _delete_range(txn, self._parts, first, last))

    def seal(self, model: str, seal: Seal) -> Future[None]:
        """Make a cut visible: it is part of the history from here on."""
        key, value = _key(model, seal.version), json.dumps(seal_record(seal)).encode()
        last = _key(model, seal.version, 2**32 - 1, 2**32 - 1)

        def write(txn: lmdb.Transaction) -> None:
            # An abandoned cut of a larger run may have left parts of further ranks.
            _delete_range(txn, self._parts, _key(model, seal.version, seal.world_size), last)
            _put(txn, key, value, self._seals)

        return self._submit(write)

    def truncate(self, model: str, upto: int, keep_seals: int) -> Future[None]:
        """Drop the rows of the cuts up to version `upto`, and their seals but for the `keep_seals` newest."""
        last = _key(model, upto, 2**32 - 1, 2**32 - 1)
        oldest_seal = _key(model, max(0, upto - keep_seals))

        def write(txn: lmdb.Transaction) -> None:
            _delete_range(txn, self._parts, _key(model, 0), last)
            _delete_range(txn, self._seals, _key(model, 0), oldest_seal)

        return self._submit(write)

    def drop_unsealed(self, model: str, sealed: int) -> Future[None]:
        """Drop the rows of cuts after version `sealed`."""
        first, last = _key(model, sealed + 1), _key(model, 2**64 - 1, 2**32 - 1, 2**32 - 1)
        return self._submit(lambda txn: _delete_range(txn, self._parts, first, last))

    def put_meta(self, name: str, value: dict[str, Any] | None) -> Future[None]:
        """Keep a small record under `name`; None forgets it."""
        key = name.encode()
        if value is None:
            return self._submit(lambda txn: _delete(txn, key, self._meta))
        encoded = json.dumps(value).encode()
        return self._submit(lambda txn: _put(txn, key, encoded, self._meta))

    # Reading, from any thread.

    def meta(self, prefix: str) -> dict[str, dict[str, Any]]:
        """All small records whose name begins with `prefix`, by the rest of their name."""
        found = {}
        with self._env.begin(db=self._meta) as txn, txn.cursor() as cursor:
            more = cursor.set_range(prefix.encode())
            while more and cursor.key().startswith(prefix.encode()):
                found[cursor.key().decode()[len(prefix) :]] = json.loads(cursor.value())
                more = cursor.next()
        return found

    def seals(self, model: str, after: int = 0) -> list[Seal]:
        """The seals after version `after` that are still kept, in order."""
        prefix, found = model.encode() + b"\0", []
        with self._env.begin(db=self._seals) as txn, txn.cursor() as cursor:
            more = cursor.set_range(_key(model, after + 1))
            while more and cursor.key().startswith(prefix):
                found.append(seal_of_record(json.loads(cursor.value())))
                more = cursor.next()
        return found

    def records(self, model: str, version: int) -> Iterator[tuple[int, int, memoryview]]:
        """Rank, number and payload of every record of a cut, in order.

        Raises:
            StorageFailed: a record does not match its checksum.
        """
        last = _key(model, version, 2**32 - 1, 2**32 - 1)
        for _, rank, number, payload in self._records(model, _key(model, version), last):
            yield rank, number, payload

    def records_after(self, view: str, release: int) -> Iterator[tuple[int, int, memoryview]]:
        """Release, slot and payload of every record of the releases after `release`, in order.

        Raises:
            StorageFailed: a record does not match its checksum.
        """
        last = _key(view, 2**64 - 1, 2**32 - 1, 2**32 - 1)
        for number, slot, _, payload in self._records(view, _key(view, release + 1), last):
            yield number, slot, payload

    def _records(self, name: str, first: bytes, last: bytes) -> Iterator[tuple[int, int, int, memoryview]]:
        """Each record is read in a transaction of its own: one held open would make the file grow."""
        key: bytes | None = first
        while key is not None:
            key, record = self._next_record(key, last)
            if key is None or record is None:
                return
            version, rank, number = struct.unpack_from(">QII", key, len(key) - 16)
            payload = memoryview(record)[_CHECKSUM_BYTES:]
            if xxhash.xxh3_64_digest(payload) != record[:_CHECKSUM_BYTES]:
                raise StorageFailed(
                    f"log record {number} of rank {rank} of version {version} of model {name!r} is damaged: "
                    "restore the data directory from a copy, or start an empty one for a full resync"
                )
            yield version, rank, number, payload
            key += b"\0"

    def used_bytes(self) -> int:
        """Bytes of the log's file that hold records."""
        with self._env.begin() as txn:
            return self._used(txn)

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in (self._parts, self._seals, self._meta)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages * stats[0]["psize"])

    def _next_record(self, start: bytes, last: bytes) -> tuple[bytes | None, bytes | None]:
        with self._env.begin(db=self._parts) as txn, txn.cursor() as cursor:
            if cursor.set_range(start) and cursor.key() <= last:
                return bytes(cursor.key()), bytes(cursor.value())
        return None, None

    # The writer's thread.

    def _append(self, txn: lmdb.Transaction, key: bytes, record: bytes) -> None:
        if self._used(txn) + len(record) > self._full_bytes:
            raise lmdb.MapFullError("full, but for what deleting needs")
        _put(txn, key, record, self._parts)

    def _submit(self, write: Write) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # A write cannot be taken back, even if its waiter is cancelled.
        self._queue.put((write, done))
        return done

    def _write_loop(self) -> None:
        while True:
            batch, closing = self._gather()
            if batch:
                self._commit(batch)
            if closing:
                return

    def _gather(self) -> tuple[list[tuple[Write, Future[None]]], bool]:
        item = self._queue.get()
        batch = []
        while item is not None:
            batch.append(item)
            if len(batch) == _COMMIT_OPERATIONS or self._queue.empty():
                return batch, False
            item = self._queue.get()
        return batch, True

    def _commit(self, batch: list[tuple[Write, Future[None]]]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for write, _ in batch:
                    write(txn)
        except lmdb.Error as error:
            if len(batch) == 1:
                self.refusing |= isinstance(error, lmdb.MapFullError)
                batch[0][1].set_exception(_storage_failed(error))
                return
            for one in batch:  # A write that fails must not fail the others.
                self._commit([one])
            return
        for _, done in batch:
            done.set_result(None)


def _open(options: LogOptions) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(options.directory), map_size=options.max_bytes, max_dbs=3, max_readers=512, readahead=False
        )
    except lmdb.Error as error:
        raise StorageFailed(
            f"the log in {options.directory} cannot be opened ({error}): restore the data directory from a copy, "
            "or start an empty one for a full resync"
        ) from error


def _storage_failed(error: lmdb.Error) -> StorageFailed:
    logger.error("the log could not be written: %s", error)
    if isinstance(error, lmdb.MapFullError):
        return StorageFailed(
            "the log is full until the tables are flushed; if it stays so, raise --log-max-bytes and restart the "
            "service; nothing was lost"
        )
    return StorageFailed(f"the log could not be written: {error}")


def _reserve(max_bytes: int) -> int:
    """Bytes that rows may not take: deleting needs free pages too, the more the more is deleted."""
    return max(max_bytes // 16, 256 << 10)


def _put(txn: lmdb.Transaction, key: bytes, value: bytes, db: Any) -> None:
    txn.put(key, value, db=db)


def _delete(txn: lmdb.Transaction, key: bytes, db: Any) -> None:
    txn.delete(key, db=db)


def _delete_range(txn: lmdb.Transaction, db: Any, first: bytes, last: bytes) -> None:
    with txn.cursor(db) as cursor:
        more = cursor.set_range(first)
        while more and bytes(cursor.key()) <= last:
            more = cursor.delete()
