"""The data directory of a service: its files, and a lock for one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deltasync.base.errors import StorageFailed
from deltasync.base.files import make_folder
from deltasync.log.volume import refused

# The remedy for a damaged or missing file.
RESTORE = "restore a backup with deltasync restore, or start an empty data directory for a full resync"

# The folder of checkpoints, in a data directory and in a backup.
CHECKPOINTS = "checkpoints"

# Every backup has this file.
BACKUP_MARKER = "backup.json"
# A data directory has this log until `restore` is finished.
UNFINISHED_LOG = "log.restoring"


def lock_data_directory(data_dir: Path) -> TextIO:
    """Make the folder if it is missing, and lock it until the returned file is closed."""
    if (data_dir / BACKUP_MARKER).exists():
        raise StorageFailed(f"{data_dir} is a backup: make a data directory from it with deltasync restore")
    lock = lock_folder(data_dir, "give this one its own --data-dir")
    if (data_dir / UNFINISHED_LOG).exists():
        lock.close()
        raise StorageFailed(
            f"{data_dir} is not completely restored: run deltasync restore again, which replaces its content"
        )
    return lock


def lock_folder(data_dir: Path, otherwise: str) -> TextIO:
    """Lock a folder, whatever it contains; see `lock_data_directory`."""
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
            f"{data_dir} cannot be locked: {error.strerror}: choose a --data-dir on a local disk, where locks work"
        ) from error
    return lock


@contextmanager
def writing(what: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn a system error inside the block into the error of `refused`; a missing file stays as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused(what, path, error, needed_bytes) from error


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Inside the block, make new files readable for this user only, whatever the umask is. Also a decorator.

    The umask belongs to the whole process, so use this only in commands, which have a process of their own.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
