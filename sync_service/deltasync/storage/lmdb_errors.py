"""What LMDB's errors mean, and what to do: an error that says so.

Only what LMDB finds wrong in its pages is damage: a disk that fails, or a limit, leaves the log as it was.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lmdb

from deltasync.core.errors import StorageFailed
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LogFull, LogUnavailable
from deltasync.storage.volume import VolumeFailed, is_refusal, refused

_DAMAGED = {
    lmdb.VersionMismatchError: "it was written by another version of LMDB, or its head is damaged: open it with "
    f"the version that wrote it, or {RESTORE}",
    lmdb.InvalidError: f"data.mdb is no log, or its head is damaged: {RESTORE}",
    lmdb.CorruptedError: f"a page of data.mdb is damaged: {RESTORE}",
    lmdb.PageNotFoundError: f"a page of data.mdb is missing: {RESTORE}",
}
_UNAVAILABLE = {
    lmdb.MemoryError: "there is no room in the process's memory for so large a log: lower --log-max-bytes, or see "
    "limits of its memory (ulimit -v, vm.overcommit_memory)",
    lmdb.ReadersFullError: "too many processes read it: end those that do",
    lmdb.PanicError: "its disk has refused a write, and it is being opened again: try again",
}
_OTHERWISE = "restart the service; deltasync fsck --data-dir says whether anything is damaged"
_NOTHING_LOST = "nothing that was acknowledged is lost"


def opening_failed(error: lmdb.Error, directory: Path) -> StorageFailed:
    """The error that the log in a folder cannot be opened."""
    return _failed(f"the log in {directory} cannot be opened", error, directory)


def reading_failed(error: lmdb.Error, file: Path) -> StorageFailed:
    """The error that the log's file cannot be read."""
    return _failed("the log cannot be read", error, file)


def writing_failed(error: Exception, file: Path, size: int) -> StorageFailed:
    """The error that a write of so many bytes to the log's file was refused."""
    if isinstance(error, lmdb.MapFullError):
        return LogFull(
            "the log is full until a checkpoint is written; if it stays so, raise --log-max-bytes and restart the "
            "service; nothing was lost"
        )
    return _failed("the log could not be written", error, file, size)


def not_open(failure: StorageFailed | None) -> StorageFailed:
    """The error that a log which is not open cannot be read; `failure` is why it could not be opened again."""
    why = failure or f"{_UNAVAILABLE[lmdb.PanicError]}; {_NOTHING_LOST}"
    return LogUnavailable(f"the log cannot be read: {why}")


def refused_write_is_there(file: Path) -> VolumeFailed:
    """The error that the log contains a write which was reported as refused: the service does not know of it."""
    what = "the log could not be opened again"
    refusal = refused(what, file, OSError(0, "it has a write that the disk had refused")).refusal
    remedy = f"restart the service, which reads it anew; {_NOTHING_LOST}"
    return VolumeFailed(what, replace(refusal, remedy=remedy))


def _failed(what: str, error: Exception, path: Path, size: int = 0) -> StorageFailed:
    if damage := _text_of(_DAMAGED, error):
        return StorageFailed(f"{what} ({error}): {damage}")
    known = _text_of(_UNAVAILABLE, error)
    if not known and is_refusal(error):
        return refused(what, path, error, size)
    return LogUnavailable(f"{what} ({error}): {known or _OTHERWISE}; {_NOTHING_LOST}")


def _text_of(texts: Mapping[type[lmdb.Error], str], error: Exception) -> str:
    return next((text for kind, text in texts.items() if isinstance(error, kind)), "")
