"""Files and folders that outlive a loss of power: their room is reserved, and their names are flushed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from deltasync.storage.volume import refused


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


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there, and those above it that are missing; each outlives a loss of power.

    Raises:
        OSError: one cannot be made.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        flush_folder(each.parent)
    if not missing:
        path.mkdir(exist_ok=True)  # Raises if it is something else.


def flush_folder(path: Path) -> None:
    """Wait until what a folder has, by name, is on disk.

    Raises:
        OSError: the disk refused it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(file: BinaryIO, size: int, what: str, path: Path) -> None:
    """Reserve a file's blocks at once: a full disk is then an error here, not a crash at a later write.

    Args:
        file: the file, open for writing.
        size: its bytes.
        what: it is called in errors.
        path: of it, or of the folder that it is in.

    Raises:
        StorageFailed: there is no room.
    """
    with writing(f"{what}: cannot reserve {size} bytes", path, size):
        os.posix_fallocate(file.fileno(), 0, size)


def allocate(path: Path, size: int) -> None:
    """Make a file of so many bytes, all zero, which is not there yet.

    Raises:
        StorageFailed: there is no room.
    """
    with writing(f"{path} cannot be made", path, size):
        make_folder(path.parent)
        with path.open("xb") as file:
            reserve(file, size, str(path), path)
            os.fsync(file.fileno())
        flush_folder(path.parent)


def extend(path: Path, size: int) -> None:
    """Make a file as long as so many bytes, the new ones zero; one that is as long stays so.

    Raises:
        StorageFailed: there is no room; the file is as it was.
    """
    before = path.stat().st_size
    if before >= size:
        return
    with writing(f"{path} cannot be made larger", path, size - before), path.open("r+b") as file:
        try:
            reserve(file, size, str(path), path)
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise
