"""A backup: a copy of what a service keeps, in a folder that says itself when it is complete.

models/...    files of tables and views, as of a flush, or later
log/data.mdb  the log, copied after them: it has all that came after that flush
backup.json   written last: every file, with its size and its digest; backup.json.new until then, from the first on
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import xxhash

from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.core.progress import Progress
from deltasync.storage.data_directory import BACKUP_MARKER, UNFINISHED_BACKUP
from deltasync.storage.files import flush_folder
from deltasync.storage.log_store import LogStore

LOG, MODELS = "log", "models"
_FORMAT = 1
_BLOCK_BYTES = 4 << 20
_LOCK = "lock.mdb"  # Of a process that has LMDB's file open.

Check = Callable[[], None]


@dataclass(frozen=True)
class BackupFile:
    """A file of a backup: its path below the folder, its size and the digest of what it has."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Backup:
    """What a backup has.

    Attributes:
        files: all of its files.
        views: the id of the history of each view whose files it has, by consumer.
        made_unix_ns: when it was complete, nanoseconds since 1970.
    """

    files: tuple[BackupFile, ...]
    views: Mapping[str, str]
    made_unix_ns: int

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.bytes for each in self.files)


def check_for_backup(directory: Path) -> None:
    """Check that a folder can take a backup, see `check_empty`: one that is not complete is replaced."""
    check_empty(directory, UNFINISHED_BACKUP, {MODELS, LOG})


def check_empty(directory: Path, marker: str, parts: Set[str], besides: Set[str] = frozenset()) -> None:
    """Check that a folder can be filled: it is not there, is empty, or has nothing but what a process has left
    that was killed as it filled it: a `marker`, made before all of the `parts`. It may have some more `besides`.

    Raises:
        InvalidInput: it has something else, is a file, or cannot be read.
    """
    try:
        found = {each.name for each in directory.iterdir()} - besides if directory.exists() else set[str]()
    except OSError as error:
        raise InvalidInput(f"{directory} cannot be used: {error.strerror}") from error
    if found and (marker not in found or found - parts - {marker}):
        raise InvalidInput(f"{directory} has something already: name a new or an empty folder")


def make_backup(
    data_dir: Path, log: LogStore, views: Mapping[str, str], directory: Path, check: Check = lambda: None
) -> Backup:
    """Copy a data directory that nobody flushes meanwhile, while cuts may go on. Blocks.

    Args:
        data_dir: the data directory.
        log: its log.
        views: see `Backup`.
        directory: a folder to be made, or one that `check_for_backup` lets pass.
        check: raises where it is to be broken off; called for every few megabytes.

    Raises:
        InvalidInput: the folder has something by now.
        StorageFailed: something could not be read or written, or another backup is being made there. The folder is
            empty then, as after any other error.
    """
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / UNFINISHED_BACKUP).open("a") as marker:
            _lock(marker, directory)
            check_for_backup(directory)
            try:
                _remove_parts(directory)
                flush_folder(directory)
                files = [*_copy_models(data_dir, directory, check), _copy_log(log, directory, check)]
                backup = Backup(tuple(files), dict(views), time.time_ns())
                sync_folders(directory)
                _complete(marker, directory, backup)
            except BaseException:  # It may be the service's own volume that is full.
                (directory / BACKUP_MARKER).unlink(missing_ok=True)
                _remove_parts(directory)
                (directory / UNFINISHED_BACKUP).unlink(missing_ok=True)
                raise
    return backup


def _lock(marker: TextIO, directory: Path) -> None:
    """Hold a marker while its backup is being made. Where a file system has no locks, nothing is held."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageFailed(f"{directory}: another backup is being made there: wait for its end") from error
    except OSError:
        return
    if not _is_at(marker, directory / UNFINISHED_BACKUP):  # That one has ended just now.
        raise StorageFailed(f"{directory}: another backup was being made there: try again")


def _is_at(file: TextIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _remove_parts(directory: Path) -> None:
    for folder in (MODELS, LOG):
        shutil.rmtree(directory / folder, ignore_errors=True)


def _copy_models(data_dir: Path, directory: Path, check: Check) -> Iterator[BackupFile]:
    (directory / MODELS).mkdir()
    paths = [path for path in sorted((data_dir / MODELS).rglob("*")) if path.is_file()]
    progress = Progress(f"backup {directory}: copying", sum(map(_size, paths)), "bytes")
    for path in paths:
        # What the log names stays where it is; others may be gone, say those of a table for which was no room.
        if path.exists():
            name = path.relative_to(data_dir)
            yield copy_file(data_dir, name, directory / name, progress, check)


def _copy_log(log: LogStore, directory: Path, check: Check) -> BackupFile:
    (directory / LOG).mkdir()
    log.copy(directory / LOG)
    return _digest(directory, f"{LOG}/data.mdb", check)


def read_backup(directory: Path) -> Backup:
    """What a complete backup says that it has.

    Raises:
        StorageFailed: it is not complete, is damaged, or a later version has made it.
    """
    path = directory / BACKUP_MARKER
    if not directory.exists():
        raise StorageFailed(f"{directory}: there is no such folder")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageFailed(
            f"{directory} is no complete backup: {BACKUP_MARKER} cannot be read ({error.strerror}): it was broken "
            "off, or is still being made: take another one, which replaces it"
        ) from error
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT:
            text = f"{path} is of format {found['format']}, this version reads format {_FORMAT}: update deltasync"
            raise StorageFailed(text)
        if found["digest"] != _digest_of(found["content"]):
            raise ValueError("it has another digest than is written there")
        return _parsed(found["content"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageFailed(f"{path} is damaged ({error!r}): take another backup") from error


def copy_file(folder: Path, path: Path, target: Path, progress: Progress, check: Check) -> BackupFile:
    """Copy the file that is at `path` in a folder, and put it on disk; what was copied. Blocks of zeros take no
    room.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = xxhash.xxh3_128(), 0
    with target.open("xb") as file:
        for block in _blocks(folder / path):
            check()
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)
            else:
                file.write(block)
            digest.update(block)
            size += len(block)
            progress.add(len(block))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return BackupFile(path.as_posix(), size, digest.hexdigest())


def sync_folders(directory: Path) -> None:
    """Flush the entries of a folder and of all below it."""
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Turn errors of the system inside of the block into one that names the folder.

    Raises:
        StorageFailed: there was one.
    """
    try:
        yield
    except OSError as error:
        place = error.filename or directory
        raise StorageFailed(f"{directory} is not complete: {place}: {error.strerror}") from error


def _digest(directory: Path, path: str, check: Check) -> BackupFile:
    """A file that is there, put on disk."""
    digest, size = xxhash.xxh3_128(), 0
    for block in _blocks(directory / path):
        check()
        digest.update(block)
        size += len(block)
    with (directory / path).open("r+b") as file:
        os.fsync(file.fileno())
    return BackupFile(path, size, digest.hexdigest())


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _complete(marker: TextIO, directory: Path, backup: Backup) -> None:
    files = {each.path: {"bytes": each.bytes, "digest": each.digest} for each in backup.files}
    content = {"made_unix_ns": backup.made_unix_ns, "views": dict(backup.views), "files": files}
    marker.truncate(0)
    json.dump({"format": _FORMAT, "digest": _digest_of(content), "content": content}, marker, indent=1)
    marker.flush()
    os.fsync(marker.fileno())
    (directory / UNFINISHED_BACKUP).rename(directory / BACKUP_MARKER)
    sync_folders(directory)


def _digest_of(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _parsed(content: Mapping[str, Any]) -> Backup:
    files = tuple(BackupFile(path, each["bytes"], each["digest"]) for path, each in content["files"].items())
    return Backup(files, content["views"], content["made_unix_ns"])
