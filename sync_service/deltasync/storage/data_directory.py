"""The folder of everything the service keeps: made if missing, and used by one service at a time."""

import fcntl
from pathlib import Path
from typing import TextIO

from deltasync.core.errors import StorageFailed

# What to do where something in it is damaged or missing.
RESTORE = "restore the data directory from a copy, or start an empty one for a full resync"


def lock_data_directory(data_dir: Path) -> TextIO:
    """Make the folder if it is missing, and hold it until the returned file is closed.

    Raises:
        StorageFailed: it cannot be made, or another service uses it.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"{data_dir} cannot be made: {error.strerror}: choose another --data-dir") from error
    lock = (data_dir / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StorageFailed(
            f"{data_dir} is in use by another service: give this one a --data-dir of its own"
        ) from None
    return lock
