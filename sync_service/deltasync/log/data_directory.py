"""The data directory of a service: its files, and that one process has it at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.files import make_folder
from deltasync.log.volume import refused


@contextmanager
def writing(what: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns what the system refuses inside into an error that says so: that of `refused`.

    A file that is missing has not been refused.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused(what, path, error, needed_bytes) from error


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Give what this process makes meanwhile to its own user alone, whatever its umask is.

    The umask belongs to the whole process: this is for commands, which are alone in theirs. Also a decorator.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


# What to do where something in it is damaged or missing.
RESTORE = "restore a backup with deltasync restore, or start an empty data directory for a full resync"

# What to do where a service uses it, and only a look or a copy is wanted.
ASK_IT = "ask that one with --service, or stop it first"

# The folder of checkpoints in it, and in a backup.
CHECKPOINTS = "checkpoints"

# What a complete backup has, and no data directory.
BACKUP_MARKER = "backup.json"
# What a backup has until it is complete, and a data directory, instead of a log, until it is restored to the end.
UNFINISHED_BACKUP, UNFINISHED_LOG = "backup.json.new", "log.restoring"


def check_is_data_directory(data_dir: Path) -> None:
    """Check that a folder has what every data directory has.

    Raises:
        InvalidInput: it has not.
    """
    if not (data_dir / "log" / "data.mdb").is_file():
        raise InvalidInput(f"{data_dir} is no data directory: it has no log/data.mdb")


def lock_data_directory(data_dir: Path, otherwise: str = "give this one a --data-dir of its own") -> TextIO:
    """Make the folder if it is missing, and hold it until the returned file is closed.

    Raises:
        StorageFailed: it cannot be made or written to, another service uses it, it is a backup, or it was not
            restored to the end.
    """
    if (data_dir / BACKUP_MARKER).exists():
        raise StorageFailed(f"{data_dir} is a backup: make a data directory of it with deltasync restore")
    if (data_dir / UNFINISHED_BACKUP).exists():
        raise StorageFailed(f"{data_dir} is a backup that is not complete: choose another --data-dir")
    lock = lock_folder(data_dir, otherwise)
    if (data_dir / UNFINISHED_LOG).exists():
        lock.close()
        raise StorageFailed(
            f"{data_dir} was not restored to the end: run deltasync restore again, which replaces what is there"
        )
    return lock


def lock_folder(data_dir: Path, otherwise: str) -> TextIO:
    """The same, whatever the folder has."""
    try:
        make_folder(data_dir)
    except OSError as error:
        failure = refused(f"{data_dir} cannot be made", data_dir, error)
        raise StorageFailed(f"{failure}, or choose another --data-dir") from error
    with writing(f"{data_dir} cannot be written to", data_dir):
        lock = (data_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise _not_locked(data_dir, error, otherwise) from error
    return lock


def _not_locked(data_dir: Path, error: OSError, otherwise: str) -> StorageFailed:
    if isinstance(error, BlockingIOError):
        return StorageFailed(f"{data_dir} is in use by another service: {otherwise}")
    return StorageFailed(
        f"{data_dir} cannot be locked: {error.strerror}: choose a --data-dir on a local disk, whose files can be"
    )
