"""The log in an LMDB file, for one service alone."""

import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import lmdb

from deltasync.base.clock import Durations
from deltasync.base.errors import StorageFailed
from deltasync.base.files import flush, make_folder
from deltasync.log.data_directory import RESTORE, writing
from deltasync.log.log_store import (
    LAST_NUMBER,
    LAST_PART,
    Address,
    Buffer,
    LogFull,
    LogOptions,
    LogUnavailable,
    QueuedLog,
    Record,
    Submitted,
)
from deltasync.log.records import (
    EARLIER_FORMAT,
    FORMAT_RECORD,
    address_of,
    damaged,
    key_of,
    name_of,
    with_checksum,
    without_checksum,
)
from deltasync.log.volume import Volume, VolumeFailed, is_refusal, refused

logger = logging.getLogger(__name__)

_RECORDS, _META = b"records", b"meta"
_READ_BYTES = 64 << 10  # One transaction reads about this much, or a single larger record.
_MAX_READERS = 512
_LOCK_BYTES = 36 << 10  # LMDB needs less for that number of readers.


class LmdbStore(QueuedLog[lmdb.Transaction]):
    """A `LogStore` in a folder."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__()
        self.shared, self._options = False, options
        self._file = options.directory / "data.mdb"
        # Deletes need free pages too, and more of them the more records there are.
        self.capacity = options.max_bytes - max(options.max_bytes // 16, 256 << 10)
        self.volume, self.commits = Volume("log", options.directory), Durations()
        self._idle, self._reads = threading.Condition(), 0  # The environment may be closed only between reads.
        self._env: lmdb.Environment | None = None
        self._closed = False
        self._not_opened: StorageFailed | None = None  # Why reopening failed.
        self._databases = dict[bytes, Any]()
        self._use(_open(options))
        self._writer.start()

    def close(self) -> None:
        """Commit the submitted writes, and close the file."""
        self.queue.close()
        self._writer.join()
        self._closed = True
        self._close_environment()

    # Reading.

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """Read the records with numbers from `first` to `last`, a few in each transaction, because a long
        transaction makes the file grow.
        """
        start, end = key_of(stream, first, 0, 0), key_of(stream, last, LAST_PART, LAST_PART)
        while records := self._next_records(start, end):
            start = records[-1][0] + b"\0"
            for key, value in records:
                _, number, part, index = address_of(key)
                payload = without_checksum(key, value, name_of(stream, number, part, index))
                yield Record(number, part, index, payload)

    def newest(self, stream: str) -> int:
        """The largest number of a stream's records; 0 if it has none."""
        end = key_of(stream, LAST_NUMBER, LAST_PART, LAST_PART)
        with self._cursor(_RECORDS) as cursor:
            found = cursor.prev() if cursor.set_range(end) else cursor.last()
            name, number, *_ = address_of(bytes(cursor.key())) if found else ("", 0)
            return number if name == stream else 0

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, keyed by the rest of their names."""
        records = {}
        with self._cursor(_META) as cursor:
            more = cursor.set_range(prefix.encode()) if prefix else cursor.first()
            while more and cursor.key().startswith(prefix.encode()):
                name = cursor.key().decode(errors="replace")
                records[name[len(prefix) :]] = bytes(
                    without_checksum(cursor.key(), cursor.value(), f"record {name}")
                )
                more = cursor.next()
        return records

    def streams(self) -> list[str]:
        """The names of all streams with records. Reads every key."""
        names: dict[str, None] = {}
        with self._cursor(_RECORDS) as cursor:
            before = b""
            for key in cursor.iternext(keys=True, values=False):
                if key <= before:
                    raise damaged(f"record with the key {key!r}")
                names[address_of(key)[0]] = None
                before = key
        return sorted(names)

    def used_bytes(self) -> int:
        """Bytes of the log file in use, as of the last write."""
        return self._used_bytes

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in self._databases.values()]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages * stats[0]["psize"])

    def _next_records(self, start: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
        """The next records, a few kilobytes together, or a single larger one."""
        records, size = list[tuple[bytes, bytes]](), 0
        with self._cursor(_RECORDS) as cursor:
            more = cursor.set_range(start)
            while more and cursor.key() <= end and size < _READ_BYTES:
                records.append((bytes(cursor.key()), bytes(cursor.value())))
                size += len(records[-1][1])
                more = cursor.next()
        return records

    @contextmanager
    def _cursor(self, name: bytes) -> Iterator["lmdb.Cursor[bytes]"]:
        with self._idle:
            if self._env is None:
                if self._closed:
                    raise LogUnavailable("the log is closed")
                why = self._not_opened or f"{_UNAVAILABLE[lmdb.PanicError]}; {_NOTHING_LOST}"
                raise LogUnavailable(f"the log cannot be read: {why}")
            env, database = self._env, self._databases[name]
            self._reads += 1
        try:
            with env.begin(db=database) as txn, txn.cursor() as cursor:
                yield cursor
        except lmdb.Error as error:
            raise reading_failed(error, self._file) from error
        finally:
            with self._idle:
                self._reads -= 1
                self._idle.notify_all()

    # The methods below run in the writer's thread.

    def _append(self, batch: lmdb.Transaction, address: Address, payload: Sequence[Buffer], size: int) -> None:
        if self._used(batch) + size > self.capacity:
            raise lmdb.MapFullError("full, except for the room that deletes need")
        key = key_of(*address)
        batch.put(key, with_checksum(key, *payload), db=self._databases[_RECORDS])

    def _put(self, batch: lmdb.Transaction, records: Mapping[str, bytes | None]) -> None:
        for name, value in records.items():
            key = name.encode()
            if value is None:
                batch.delete(key, db=self._databases[_META])
            else:
                batch.put(key, with_checksum(key, value), db=self._databases[_META])

    def _drop(self, batch: lmdb.Transaction, stream: str, number: int, part: int | None) -> None:
        first, last = key_of(stream, number, part or 0, 0), key_of(stream, number, part or 0, LAST_PART)
        if part is None:
            last = key_of(stream, LAST_NUMBER, LAST_PART, LAST_PART)
        self._delete_range(batch, first, last)

    def _truncate(self, batch: lmdb.Transaction, stream: str, upto: int) -> None:
        self._delete_range(batch, key_of(stream, 0, 0, 0), key_of(stream, upto, LAST_PART, LAST_PART))

    def _delete_range(self, txn: lmdb.Transaction, first: bytes, last: bytes) -> None:
        with txn.cursor(self._databases[_RECORDS]) as cursor:
            more = cursor.set_range(first)
            while more and bytes(cursor.key()) <= last:
                more = cursor.delete()

    def _write(self, submitted: list[Submitted]) -> None:
        if submitted:
            self._commit(submitted)

    def _commit(self, batch: list[Submitted]) -> None:
        begun = time.monotonic()
        try:
            env = self._opened()
            with env.begin(write=True) as txn:
                for write, _, _ in batch:
                    write(txn)
                used = self._used(txn)
            self._used_bytes, self._newest = used, env.info()["last_txnid"]
        except Exception as error:  # noqa: BLE001  # The waiter gets the error, and the thread continues.
            if not self._works() or len(batch) == 1:
                self.queue.end(batch)
                for _, done, size in batch:
                    self._fail(done, size, error)
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):  # A failed write must not fail the others.
                self._commit(half)
            return
        self.commits.add(time.monotonic() - begun)
        self.volume.take(sum(size for _, _, size in batch))
        self.queue.end(batch)
        for _, done, _ in batch:
            done.set_result(None)

    def _works(self) -> bool:
        """Whether LMDB still works, so that only a write failed. If not, try to open it again."""
        try:
            if self._env:
                self._env.begin().abort()
                return True
        except lmdb.PanicError:
            self._close_environment()
            with suppress(StorageFailed):  # The next write fails with the same error.
                self._opened()
        except lmdb.Error:
            return True
        return False

    def _opened(self) -> lmdb.Environment:
        """The environment, reopened if it had to be closed."""
        if self._env:
            return self._env
        try:
            env = _open(self._options)
            try:
                env.sync(force=True)  # LMDB restored the earlier head, which may not be on disk yet.
                if env.info()["last_txnid"] != self._newest:
                    # The service does not know of this write, because it was reported as refused.
                    what = "the log could not be opened again"
                    refusal = refused(
                        what, self._file, OSError(0, "it contains a write that the disk had refused")
                    ).refusal
                    remedy = f"restart the service, which reads the log again; {_NOTHING_LOST}"
                    raise VolumeFailed(what, replace(refusal, remedy=remedy))
                self._use(env)
            except BaseException:
                env.close()
                raise
        except (lmdb.Error, StorageFailed) as error:
            failure = error if isinstance(error, StorageFailed) else writing_failed(error, self._file, 0)
            if isinstance(failure, VolumeFailed):
                self.volume.refuse(failure.refusal)
            self._not_opened = failure
            raise failure from error
        self._not_opened = None
        return env

    def _use(self, env: lmdb.Environment) -> None:
        self._databases = {name: env.open_db(name) for name in (_RECORDS, _META)}
        with env.begin() as txn:
            self._used_bytes = self._used(txn)
        self._newest = env.info()["last_txnid"]
        self._env = env

    def _close_environment(self) -> None:
        with self._idle:
            env, self._env = self._env, None
            self._idle.wait_for(lambda: not self._reads)
        if env:
            env.close()

    def _fail(self, done: Future[None], size: int, error: Exception) -> None:
        if isinstance(error, StorageFailed):  # An earlier write was refused, and logged.
            done.set_exception(error)
            return
        failure = writing_failed(error, self._file, size)
        if not (self.refusing or self.volume.refusal):  # Log once until the problem ends.
            logger.error("%s", failure, exc_info=None if isinstance(error, lmdb.Error) else error)
        self.refusing |= isinstance(failure, LogFull)
        if isinstance(failure, VolumeFailed):
            self.volume.refuse(failure.refusal)
        failure.__cause__ = error
        done.set_exception(failure)


def read_format(directory: Path) -> bytes | None:
    """The format record of a log that is not open, without a change of any file; None if there is no log."""
    file, key = directory / "data.mdb", FORMAT_RECORD.encode()
    with writing(f"the log in {directory} cannot be opened", directory):
        check_size(file)
        if not file.exists() or not file.stat().st_size:
            return None
    try:
        with closing(lmdb.open(str(directory), readonly=True, lock=False, create=False, max_dbs=4)) as env:
            database = env.open_db(_META, create=False)
            with env.begin(db=database) as txn:
                if (value := txn.get(key)) is not None:
                    return bytes(without_checksum(key, bytes(value), f"record {FORMAT_RECORD}"))
                others = [(bytes(name), bytes(value)) for name, value in txn.cursor()]
    except lmdb.NotFoundError:
        return None
    except lmdb.Error as error:
        raise opening_failed(error, directory) from error
    for name, value in others:  # One of them may be the record of the format, with a damaged name.
        without_checksum(name, value, f"record {name.decode(errors='replace')}")
    if others:
        raise StorageFailed(EARLIER_FORMAT)
    return None


def _open(options: LogOptions) -> lmdb.Environment:
    directory = options.directory
    with ExitStack() as undo, writing(f"the log in {directory} cannot be opened", directory):
        check_size(directory / "data.mdb")
        make_folder(directory)
        with (directory / "lock.mdb").open("ab") as file:
            # LMDB maps this file for its readers. Without room, their first write to it would kill the process.
            try:
                os.posix_fallocate(file.fileno(), 0, _LOCK_BYTES)
            except OSError:
                if os.fstat(file.fileno()).st_blocks == 0:
                    file.truncate(0)
                    raise
        if not (data := directory / "data.mdb").exists() or not data.stat().st_size:
            # If the disk has room for only some of its heads, the file would look damaged at the next start.
            undo.callback(data.unlink, missing_ok=True)
        try:
            env = lmdb.open(
                str(directory), map_size=options.max_bytes, max_dbs=4, max_readers=_MAX_READERS, readahead=False
            )
            undo.callback(env.close)
            for database in (_RECORDS, _META):
                env.open_db(database)
            flush(directory)  # LMDB flushes its files, but not the folder with their names.
        except lmdb.Error as error:
            raise opening_failed(error, directory) from error
        undo.pop_all()
    return env


_DAMAGED = {
    lmdb.VersionMismatchError: "another version of LMDB wrote it, or its head is damaged: open it with "
    f"that version, or {RESTORE}",
    lmdb.InvalidError: f"data.mdb is not a log, or its head is damaged: {RESTORE}",
    lmdb.CorruptedError: f"a page of data.mdb is damaged: {RESTORE}",
    lmdb.PageNotFoundError: f"a page of data.mdb is missing: {RESTORE}",
}
_UNAVAILABLE = {
    lmdb.MemoryError: "the process has too little memory for a log of this size: lower --log-max-bytes, or raise "
    "the memory limits (ulimit -v, vm.overcommit_memory)",
    lmdb.ReadersFullError: "too many processes read it: end some of them",
    lmdb.PanicError: "its disk refused a write, and it is being opened again: try again",
}
_OTHERWISE = "restart the service, which reads the log again"
_NOTHING_LOST = "no acknowledged write is lost"


def opening_failed(error: lmdb.Error, directory: Path) -> StorageFailed:
    """The error for a log that cannot be opened."""
    return _failed(f"the log in {directory} cannot be opened", error, directory)


def reading_failed(error: lmdb.Error, file: Path) -> StorageFailed:
    """The error for a log file that cannot be read."""
    return _failed("the log cannot be read", error, file)


def writing_failed(error: Exception, file: Path, size: int) -> StorageFailed:
    """The error for a refused write of `size` bytes to the log file."""
    if isinstance(error, lmdb.MapFullError):
        return LogFull(
            "the log is full until a checkpoint is written; if it stays full, raise --log-max-bytes and restart "
            "the service; nothing was lost"
        )
    return _failed("the log could not be written", error, file, size)


def _failed(what: str, error: Exception, path: Path, size: int = 0) -> StorageFailed:
    if damage := _text_of(_DAMAGED, error):
        return StorageFailed(f"{what} ({error}): {damage}")
    unavailable = _text_of(_UNAVAILABLE, error)
    if not unavailable and is_refusal(error):
        return refused(what, path, error, size)
    return LogUnavailable(f"{what} ({error}): {unavailable or _OTHERWISE}; {_NOTHING_LOST}")


def _text_of(texts: Mapping[type[lmdb.Error], str], error: Exception) -> str:
    return next((text for kind, text in texts.items() if isinstance(error, kind)), "")


# The layout of LMDB 0.9. A file begins with two heads, one a page; the one with the larger transaction counts.
_PAGE = struct.Struct("<QHHHH")  # Number, padding, flags, lower and upper end of the free space.
# Magic, version, page size, root of the free list, last page, transaction.
_HEAD = struct.Struct("<II16xI36xQ48xQQ")
_NODE = struct.Struct("<HHHH")  # Low and high half of the size or of the page, flags, size of the key.
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _ON_OTHER_PAGES, _NO_PAGE = 1, 2, 1, 2**64 - 1
_SMALLEST_PAGE = 4096


def check_size(path: Path) -> None:
    """Check that a file has all pages that its head names, before LMDB maps it: reading behind its end kills the
    process. LMDB itself checks the rest.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _newest_head(file)
        if head is None:
            return
        page_bytes, free_root, last = head
        if size >= (last + 1) * page_bytes:
            return
        # LMDB does not write free pages at the end.
        there = size // page_bytes
        try:
            lost = set(range(there, last + 1)).difference(_free_pages(file, page_bytes, free_root))
        except (struct.error, RecursionError):
            lost = {last}
    if lost:
        needed = (max(lost) + 1) * page_bytes
        raise StorageFailed(f"{path} was cut short: it has {size} bytes, but needs {needed}: {RESTORE}")


def _newest_head(file: BinaryIO) -> tuple[int, int, int] | None:
    """Page size, root of the free list, and last page; None if the file has no head, which LMDB reports."""
    heads = list[tuple[int, int, int, int]]()
    for at in (0, _SMALLEST_PAGE):
        if heads:
            at = heads[0][1]
        file.seek(at + _PAGE.size)
        raw = file.read(_HEAD.size)
        if len(raw) < _HEAD.size:
            break
        magic, version, page_bytes, root, last, transaction = _HEAD.unpack(raw)
        if (magic, version) == (_MAGIC, _VERSION) and page_bytes >= 512:
            heads.append((transaction, page_bytes, root, last))
    return max(heads)[1:] if heads else None


def _free_pages(file: BinaryIO, page_bytes: int, root: int) -> Iterator[int]:
    """The pages in the free list: a tree whose leaves are lists of page numbers."""
    if root == _NO_PAGE:
        return
    page = _read(file, root * page_bytes, page_bytes)
    _, _, flags, lower, _ = _PAGE.unpack_from(page)
    for (at,) in struct.iter_unpack("<H", page[_PAGE.size : lower]):
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
        content = at + _NODE.size
        if flags & _BRANCH:
            yield from _free_pages(file, page_bytes, low | high << 16 | node_flags << 32)
        elif node_flags & _ON_OTHER_PAGES:
            (first,) = struct.unpack_from("<Q", page, content + key_bytes)
            yield from _numbers(_read(file, first * page_bytes + _PAGE.size, low | high << 16))
        else:
            yield from _numbers(page[content + key_bytes :][: low | high << 16])


def _numbers(raw: bytes) -> Iterator[int]:
    """The numbers of a list, which begins with their count."""
    (count,) = struct.unpack_from("<Q", raw)
    yield from struct.unpack_from(f"<{count}Q", raw, 8)


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    """Read bytes. Too few lead to an error of `struct`."""
    file.seek(at)
    return file.read(size)
