"""What a volume refuses, why, and when that is over."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from deltasync.base.errors import StorageFailed
from deltasync.log.data_directory import RESTORE
from deltasync.log.lmdb_store import opening_failed, reading_failed, writing_failed
from deltasync.log.log_store import LogFull, LogUnavailable
from deltasync.log.volume import Refusal, Volume, VolumeFailed, refused

MIB = 1 << 20


def free(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr("deltasync.log.volume.os.statvfs", lambda _: SimpleNamespace(f_bavail=size, f_frsize=1))


def refusal(path: Path, number: int, needed: int) -> Refusal:
    return refused("it", path, OSError(number, os.strerror(number)), needed).refusal


@pytest.mark.parametrize(
    ("error", "room", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            7,
            "No space left on device (the write needs 5 bytes, 7",
        ),
        (OSError(errno.EROFS, "Read-only file system"), 7, "mount it for writing"),
        (OSError(errno.EFBIG, "File too large"), 7, "ulimit -f"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 7, "raise the quota"),
        (OSError(errno.EIO, "Input/output error"), 2 * MIB, "look for errors of the device"),
        (lmdb.DiskError("mdb_txn_commit: Input/output error"), 2 * MIB, "look for errors of the device"),
        (
            lmdb.DiskError("mdb_txn_commit: Input/output error"),
            7,
            "No space left on device, reported as 'mdb_txn_commit",
        ),
        (lmdb.Error("mdb_txn_commit: No space left on device"), 7, "make room on it"),
        (OSError(errno.ENXIO, "No such device or address"), 7, "look for its errors in the system log"),
        (lmdb.Error("mdb_txn_commit: No such device or address"), 7, "look for its errors in the system log"),
        (lmdb.Error("mdb_txn_commit: Stale file handle"), 7, "look for its errors in the system log"),
        (lmdb.Error("mdb_env_open: Too many open files"), 7, "ulimit -n"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, room: int, said: str
) -> None:
    free(monkeypatch, room)
    assert said in str(refused("a file cannot be made", tmp_path / "not" / "there", error, 5))


def test_an_unknown_size_of_a_refused_write_is_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 7)
    said = str(refused("it", tmp_path, OSError(errno.ENOSPC, "No space left on device")))
    assert said == "it: No space left on device (7 bytes are free): make room on it"


def test_of_several_refusals_the_largest_stays_with_the_first_time(tmp_path: Path) -> None:
    volume = Volume("log", tmp_path)
    first = refusal(tmp_path / "a", errno.ENOSPC, 10)
    for each in (first, refusal(tmp_path / "b", errno.ENOSPC, 5), refusal(tmp_path / "c", errno.ENOSPC, 20)):
        volume.refuse(each)
    assert volume.refusal
    assert (volume.refusal.path.name, volume.refusal.needed_bytes) == ("c", 20)
    assert volume.refusal.since_unix_ns == first.since_unix_ns
    volume.recover(first)  # Since then, a larger one was refused.
    assert volume.refusal


@pytest.mark.parametrize(("number", "over"), [(errno.EIO, True), (errno.ENOSPC, False), (errno.EFBIG, False)])
def test_a_write_as_large_shows_that_it_is_over_but_for_want_of_room(
    tmp_path: Path, number: int, over: bool
) -> None:
    """A file may have room inside, of what was deleted in it, and the volume none."""
    volume = Volume("log", tmp_path)
    volume.refuse(refusal(tmp_path, number, 10))
    volume.take(9)
    assert volume.refusal
    volume.take(10)
    assert (volume.refusal is None) is over


def test_room_is_there_again_once_all_that_was_refused_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, found = Volume("models", tmp_path), refusal(tmp_path, errno.ENOSPC, 3 * MIB)
    for room, takes in ((0, False), (3 * MIB, False), (4 * MIB, True)):
        with monkeypatch.context() as patch:
            free(patch, room)
            assert volume.probe(found) is takes
    assert list(tmp_path.iterdir()) == []


def test_a_volume_that_refuses_still_is_found_to(tmp_path: Path) -> None:
    volume, found = Volume("models", tmp_path / "folder"), refusal(tmp_path, errno.EROFS, 10)
    volume.folder.touch()
    assert not volume.probe(found)
    volume.folder.unlink()
    volume.folder.mkdir()
    assert volume.probe(found)


def test_a_file_that_may_not_be_as_large_is_found_so(tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    path.write_bytes(bytes(10))
    assert Volume("log", tmp_path).probe(refusal(path, errno.EFBIG, 10))
    assert not Volume("log", tmp_path).probe(refusal(path, errno.EFBIG, 1 << 62))


def test_only_errors_of_a_volume_are_refusals(tmp_path: Path) -> None:
    assert isinstance(writing_failed(lmdb.MapFullError("full"), tmp_path, 5), LogFull)
    for error in (lmdb.CorruptedError("x"), lmdb.PanicError("x"), TypeError("x")):
        failure = writing_failed(error, tmp_path, 5)
        assert isinstance(failure, StorageFailed)
        assert not isinstance(failure, VolumeFailed | LogFull)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lmdb.VersionMismatchError("MDB_VERSION_MISMATCH"), "another version of LMDB"),
        (
            lmdb.InvalidError("MDB_INVALID: File is not an LMDB file"),
            "data.mdb is not a log, or its head is damaged",
        ),
        (lmdb.CorruptedError("MDB_CORRUPTED: Located page was wrong type"), "a page of data.mdb is damaged"),
        (lmdb.MemoryError("Cannot allocate memory"), "lower --log-max-bytes"),
        (lmdb.ReadonlyError("Permission denied"), "give the service's user access to it"),
        (lmdb.Error("Read-only file system"), "mount it for writing"),
    ],
)
def test_a_log_that_cannot_be_opened_says_where_and_what_to_do(
    tmp_path: Path, error: lmdb.Error, said: str
) -> None:
    failure = opening_failed(error, tmp_path)
    assert str(failure).startswith(f"the log in {tmp_path} cannot be opened")
    assert said in str(failure)


DAMAGE = [
    lmdb.VersionMismatchError("MDB_VERSION_MISMATCH"),
    lmdb.InvalidError("MDB_INVALID: File is not an LMDB file"),
    lmdb.CorruptedError("MDB_CORRUPTED: Located page was wrong type"),
    lmdb.PageNotFoundError("MDB_PAGE_NOTFOUND: Requested page not found"),
]
OF_THE_VOLUME = [
    lmdb.DiskError("mdb_env_open: Input/output error"),
    lmdb.Error("mdb_txn_commit: No such device or address"),
]
NO_DAMAGE = [
    lmdb.PanicError("MDB_PANIC: Update of meta page failed or environment had fatal error"),
    lmdb.ReadersFullError("MDB_READERS_FULL: Environment maxreaders limit reached"),
    lmdb.MemoryError("Cannot allocate memory"),
    lmdb.TxnFullError("MDB_TXN_FULL: Transaction has too many dirty pages - transaction too big"),
    lmdb.BadRslotError("MDB_BAD_RSLOT: Invalid reuse of reader locktable slot"),
]


@pytest.mark.parametrize("error", [*DAMAGE, *OF_THE_VOLUME, *NO_DAMAGE])
def test_only_what_is_wrong_in_the_file_is_damage(tmp_path: Path, error: lmdb.Error) -> None:
    """Whoever restores a backup loses what came since: nobody is to be told so who need not."""
    for each in (
        opening_failed(error, tmp_path),
        reading_failed(error, tmp_path),
        writing_failed(error, tmp_path, 5),
    ):
        assert str(each).endswith(RESTORE) is (error in DAMAGE)
        assert isinstance(each, VolumeFailed) is (error in OF_THE_VOLUME)
        assert isinstance(each, LogUnavailable) is (error in NO_DAMAGE)
