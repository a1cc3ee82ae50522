"""What LMDB's errors mean, and what to do: an error that says so."""

from pathlib import Path

import lmdb

from deltasync.core.errors import StorageFailed
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LogFull
from deltasync.storage.volume import is_refusal, refused

_NOT_OPENED = {
    lmdb.VersionMismatchError: "it was written by another version of LMDB, or its head is damaged: open it with "
    f"the version that wrote it, or {RESTORE}",
    lmdb.InvalidError: f"data.mdb is no log, or its head is damaged: {RESTORE}",
    lmdb.MemoryError: "there is no room in the process's memory for so large a log: lower --log-max-bytes, or see "
    "limits of its memory (ulimit -v, vm.overcommit_memory)",
    lmdb.ReadersFullError: "too many processes read it: end those that do",
}


def opening_failed(error: lmdb.Error, directory: Path) -> StorageFailed:
    """The error that the log in a folder cannot be opened."""
    what = f"the log in {directory} cannot be opened"
    if is_refusal(error):
        return refused(what, directory, error)
    known = next((text for kind, text in _NOT_OPENED.items() if isinstance(error, kind)), None)
    return StorageFailed(f"{what}: {known}" if known else f"{what}: it is damaged ({error}): {RESTORE}")


def reading_failed(error: lmdb.Error) -> StorageFailed:
    """The error that the log cannot be read."""
    return StorageFailed(f"the log cannot be read ({error}): {RESTORE}")


def writing_failed(error: Exception, file: Path, size: int) -> StorageFailed:
    """The error that a write of so many bytes to the log's file was refused."""
    if isinstance(error, lmdb.MapFullError):
        return LogFull(
            "the log is full until the tables are flushed; if it stays so, raise --log-max-bytes and restart the "
            "service; nothing was lost"
        )
    if is_refusal(error):
        return refused("the log could not be written", file, error, size)
    if isinstance(error, lmdb.PanicError):
        return StorageFailed(
            f"the log could not be written ({error}): its disk has refused a write from which LMDB does not come "
            "back: look at the disk, and restart the service; nothing that was acknowledged is lost"
        )
    if isinstance(error, lmdb.Error):
        return StorageFailed(f"the log could not be written: it is damaged ({error}): {RESTORE}")
    return StorageFailed(f"the log could not be written: {error!r}")
