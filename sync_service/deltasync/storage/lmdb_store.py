"""The log in LMDB: a file of the service's own, without a server.

Two databases, whose keys LMDB keeps in order:

    records  stream, 0, number, part, index (big-endian)  ->  checksum + payload
    meta     name                                         ->  checksum + value

A checksum is of key and payload, so that a record under another key is found like one that was changed. What LMDB
itself writes around them has none (heads and inner keys of its pages, its list of free pages): damage there is
found as far as LMDB finds it, as keys out of order, or as records that are missing.

One thread writes; it commits all that has gathered since its last commit together (group commit). It is not woken
by what is patient.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import lmdb

from deltasync.core.errors import StorageFailed
from deltasync.storage import format_1
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.lmdb_file import is_truncated
from deltasync.storage.lmdb_records import address_of, damaged, key_of, with_checksum, without_checksum
from deltasync.storage.log_store import LAST_NUMBER, LAST_PART, Buffer, LogOptions, Record
from deltasync.storage.records import name_of

logger = logging.getLogger(__name__)

_RECORDS, _META = b"records", b"meta"
# Bound what one transaction holds in memory.
_COMMIT_BYTES, _COMMIT_OPERATIONS = 32 << 20, 4096
_WAITING_OPERATIONS = 8  # So many that may wait for others do not wait any longer.

Write = Callable[[lmdb.Transaction], None]


_Submitted = tuple[Write, Future[None], int]  # How many bytes it writes.


class LmdbStore:
    """A `LogStore` in a folder. What its methods do stands there.

    Attributes:
        refusing: a write was refused for want of room; cleared once there is room again.

    Raises:
        StorageFailed: the file is not a log, is damaged, or cannot be brought to this version's format.
    """

    def __init__(self, options: LogOptions) -> None:
        options.directory.mkdir(parents=True, exist_ok=True)
        self._env = _open(options)
        self._full_bytes = options.max_bytes - _reserve(options.max_bytes)
        self.refusing = False
        self._records, self._meta = (self._env.open_db(name) for name in (_RECORDS, _META))
        self._queue: queue.SimpleQueue[list[_Submitted] | None] = queue.SimpleQueue()
        self._waiting: list[_Submitted] = []  # Patient ones, of which the writer knows nothing yet.
        self._submitting = threading.Lock()
        self._closed = False
        self._writer = threading.Thread(target=self._write_loop, name="log-writer", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Commit what was submitted and close the file."""
        with self._submitting:
            self._closed = True
            self._queue.put(self._waiting)
            self._queue.put(None)
        self._writer.join()
        self._env.close()

    # Writing.

    def append(
        self,
        stream: str,
        number: int,
        part: int,
        index: int,
        *payload: Buffer,
        after: Sequence[Future[None]] = (),
        patient: bool = False,
    ) -> Future[None]:
        """Write a record, whose payload comes in pieces, unless a write `after` which it comes was refused."""
        key = key_of(stream, number, part, index)
        size = sum(memoryview(piece).nbytes for piece in payload)
        return self._submit(lambda txn: self._append(txn, key, payload, after), size, patient=patient)

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Forget the records from `number` on, or only those of one part of `number`."""
        first, last = key_of(stream, number, part or 0, 0), key_of(stream, number, part or 0, LAST_PART)
        if part is None:
            last = key_of(stream, LAST_NUMBER, LAST_PART, LAST_PART)
        return self._submit(lambda txn: self._delete_range(txn, first, last), patient=patient)

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Forget the records up to number `upto`."""
        first, last = key_of(stream, 0, 0, 0), key_of(stream, upto, LAST_PART, LAST_PART)
        return self._submit(lambda txn: self._delete_range(txn, first, last))

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Keep a small record, unless a write `after` which it comes was refused; None forgets it."""
        key = name.encode()
        return self._submit(lambda txn: self._keep(txn, key, value, after))

    # Reading.

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """The records with numbers from `first` to `last`, each read in a transaction of its own: one held open
        would make the file grow.
        """
        start, end = key_of(stream, first, 0, 0), key_of(stream, last, LAST_PART, LAST_PART)
        while found := self._next_record(start, end):
            key, value = found
            _, number, part, index = address_of(key)
            payload = without_checksum(key, value, name_of(stream, number, part, index))
            yield Record(number, part, index, payload)
            start = key + b"\0"

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, by the rest of their names."""
        found = {}
        with self._cursor(self._meta) as cursor:
            more = cursor.set_range(prefix.encode()) if prefix else cursor.first()
            while more and cursor.key().startswith(prefix.encode()):
                name = cursor.key().decode(errors="replace")
                found[name[len(prefix) :]] = bytes(
                    without_checksum(cursor.key(), cursor.value(), f"record {name}")
                )
                more = cursor.next()
        return found

    def streams(self) -> list[str]:
        """The names of all streams that have records; every key is looked at."""
        names: dict[str, None] = {}
        with self._cursor(self._records) as cursor:
            before = b""
            for key in cursor.iternext(keys=True, values=False):
                if key <= before:
                    raise damaged(f"record with the key {key!r}")
                names[address_of(key)[0]] = None
                before = key
        return sorted(names)

    def used_bytes(self) -> int:
        """Bytes of the log's file that hold records."""
        with self._env.begin() as txn:
            return self._used(txn)

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in (self._records, self._meta)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages * stats[0]["psize"])

    def _next_record(self, start: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        with self._cursor(self._records) as cursor:
            if cursor.set_range(start) and cursor.key() <= end:
                return bytes(cursor.key()), bytes(cursor.value())
        return None

    @contextmanager
    def _cursor(self, database: Any) -> Iterator["lmdb.Cursor[bytes]"]:
        try:
            with self._env.begin(db=database) as txn, txn.cursor() as cursor:
                yield cursor
        except lmdb.Error as error:
            raise StorageFailed(f"the log cannot be read ({error}): {RESTORE}") from error

    # The writer's thread.

    def _append(
        self, txn: lmdb.Transaction, key: bytes, payload: Sequence[Buffer], after: Sequence[Future[None]]
    ) -> None:
        _check_written(after)
        value = with_checksum(key, *payload)
        if self._used(txn) + len(value) > self._full_bytes:
            raise lmdb.MapFullError("full, but for what deleting needs")
        _put(txn, key, value, self._records)

    def _keep(self, txn: lmdb.Transaction, key: bytes, value: bytes | None, after: Sequence[Future[None]]) -> None:
        _check_written(after)
        if value is None:
            _delete(txn, key, self._meta)
        else:
            _put(txn, key, with_checksum(key, value), self._meta)

    def _delete_range(self, txn: lmdb.Transaction, first: bytes, last: bytes) -> None:
        with txn.cursor(self._records) as cursor:
            more = cursor.set_range(first)
            while more and bytes(cursor.key()) <= last:
                more = cursor.delete()

    def _submit(self, write: Write, size: int = 0, *, patient: bool = False) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # A write cannot be taken back, even if its waiter is cancelled.
        with self._submitting:
            if self._closed:  # Nobody writes any more: who waits for it would wait for ever.
                done.set_exception(StorageFailed("the log is closed: the service is shutting down"))
                return done
            self._waiting.append((write, done, size))
            if not patient or len(self._waiting) == _WAITING_OPERATIONS:
                self._queue.put(self._waiting)
                self._waiting = []
        return done

    def _write_loop(self) -> None:
        while True:
            batch, closing = self._gather()
            if batch:
                self._commit(batch)
            if closing:
                return
            del batch  # Not kept until the next write: closures hold rows.

    def _gather(self) -> tuple[list[_Submitted], bool]:
        batch, size = list[_Submitted](), 0
        while (submitted := self._queue.get()) is not None:
            batch += submitted
            size += sum(each for _, _, each in submitted)
            if size >= _COMMIT_BYTES or len(batch) >= _COMMIT_OPERATIONS or self._queue.empty():
                return batch, False
        return batch, True

    def _commit(self, batch: list[_Submitted]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for write, _, _ in batch:
                    write(txn)
        except Exception as error:  # noqa: BLE001  # Whatever it is, its waiter is told, and the thread goes on.
            if len(batch) == 1:
                self._fail(batch[0][1], error)
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):  # A write that fails must not fail the others.
                self._commit(half)
            return
        for _, done, _ in batch:
            done.set_result(None)

    def _fail(self, done: Future[None], error: Exception) -> None:
        if isinstance(error, StorageFailed):  # Of a write that this one was to come after, told already.
            done.set_exception(error)
            return
        logger.error("the log could not be written: %r", error, exc_info=not isinstance(error, lmdb.Error))
        self.refusing |= isinstance(error, lmdb.MapFullError)
        failure = _storage_failed(error)
        failure.__cause__ = error
        done.set_exception(failure)


def _open(options: LogOptions) -> lmdb.Environment:
    directory = options.directory
    with ExitStack() as undo:
        try:
            env = lmdb.open(
                str(directory), map_size=options.max_bytes, max_dbs=4, max_readers=512, readahead=False
            )
            undo.callback(env.close)
            if is_truncated(directory / "data.mdb"):
                raise StorageFailed(
                    f"the log in {directory} is cut off: pages are missing at the end of data.mdb: {RESTORE}"
                )
            format_1.migrate(env, options.max_bytes)
            for database in (_RECORDS, _META):
                env.open_db(database)
        except lmdb.Error as error:
            raise StorageFailed(f"the log in {directory} cannot be opened ({error}): {RESTORE}") from error
        undo.pop_all()
    return env


def _storage_failed(error: Exception) -> StorageFailed:
    if isinstance(error, lmdb.MapFullError):
        return StorageFailed(
            "the log is full until the tables are flushed; if it stays so, raise --log-max-bytes and restart the "
            "service; nothing was lost"
        )
    return StorageFailed(
        f"the log could not be written: {error if isinstance(error, lmdb.Error) else repr(error)}"
    )


def _reserve(max_bytes: int) -> int:
    """Bytes that rows may not take: deleting needs free pages too, the more the more is deleted."""
    return max(max_bytes // 16, 256 << 10)


def _check_written(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        # One that is not done was written by this very transaction.
        if write.done() and (error := write.exception()):
            raise error


def _put(txn: lmdb.Transaction, key: bytes, value: bytes, db: Any) -> None:
    txn.put(key, value, db=db)


def _delete(txn: lmdb.Transaction, key: bytes, db: Any) -> None:
    txn.delete(key, db=db)
