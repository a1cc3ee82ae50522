"""The data directory of a service: its files, and the lock that one process at a time holds."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.files import make_folder
from deltasync.log.volume import refused

# The remedy for a damaged or missing file in it.
RESTORE = "restore a backup with deltasync restore, or start an empty data directory for a full resync"

# The remedy for a command that only reads or copies it while a service uses it.
ASK_IT = "ask that one with --service, or stop it first"

# The folder of checkpoints in it, and in a backup.
CHECKPOINTS = "checkpoints"

# A complete backup has this file; no data directory has.
BACKUP_MARKER = "backup.json"
# A backup has this file until it is complete; a data directory has this log until it is restored to the end.
UNFINISHED_BACKUP, UNFINISHED_LOG = "backup.json.new", "log.restoring"


def lock_data_directory(data_dir: Path, otherwise: str = "give this one a --data-dir of its own") -> TextIO:
    """Make the folder if it is missing, and lock it until the returned file is closed.

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
    """The same for a folder of any content."""
    try:
        make_folder(data_dir)
    except OSError as error:
        failure = refused(f"{data_dir} cannot be made", data_dir, error)
        raise StorageFailed(f"{failure}, or choose another --data-dir") from error
    with writing(f"{data_dir} cannot be written to", data_dir):
        lock = (data_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise StorageFailed(f"{data_dir} is in use by another service: {otherwise}") from error
    except OSError as error:
        lock.close()
        raise StorageFailed(
            f"{data_dir} cannot be locked: {error.strerror}: choose a --data-dir on a local disk, whose files "
            "can be"
        ) from error
    return lock


def check_is_data_directory(data_dir: Path) -> None:
    """Check that a folder is a data directory.

    Raises:
        InvalidInput: it is not.
    """
    if not (data_dir / "log" / "data.mdb").is_file():
        raise InvalidInput(f"{data_dir} is no data directory: it has no log/data.mdb")


@contextmanager
def writing(what: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an error of the system inside the block into one of `refused`.

    A missing file is not refused.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused(what, path, error, needed_bytes) from error


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Inside the block, new files belong to the process's user alone, whatever its umask is.

    The umask belongs to the whole process: this is for commands, which run alone in theirs. Also a decorator.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
