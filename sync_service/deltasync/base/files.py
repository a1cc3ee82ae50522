"""Folders and files on disk: durable folders, readable files, and files that change."""

import asyncio
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from deltasync.base.errors import InvalidInput


def make_folder(path: Path) -> None:
    """Make a folder and the missing ones above it, unless it exists. All survive a loss of power.

    Raises:
        OSError: one cannot be made.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        flush_folder(each.parent)
    if not missing:
        path.mkdir(exist_ok=True)  # Raises if it is a file.


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk.

    Raises:
        OSError: the disk refused it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable_by_all(path: Path) -> bool:
    """Whether every user of the machine may read a file.

    Raises:
        InvalidInput: the file cannot be found.
    """
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error


class FileWatch:
    """Files that may change: written, replaced, or reached through a link that changes.

    Make it before the files are first read: then it notices a change during the reading.
    """

    def __init__(self, paths: Iterable[Path], seconds: float = 1.0) -> None:
        self._paths = tuple(paths)
        self._seconds = seconds
        self._seen = _traces(self._paths)

    async def changed(self) -> None:
        """Wait until a file differs from its state at the last return, or when this was made.

        A thread looks at the files, since a disk may be slow.
        """
        while True:
            await asyncio.sleep(self._seconds)
            traces = await asyncio.to_thread(_traces, self._paths)
            if traces != self._seen:
                self._seen = traces
                return


def _traces(paths: tuple[Path, ...]) -> list[tuple[int, int, int] | None]:
    """What changes with each file, at the end of links: time, size and inode; None for one that cannot be seen."""
    traces = list[tuple[int, int, int] | None]()
    for path in paths:
        try:
            file = path.stat()
        except OSError:
            traces.append(None)
        else:
            traces.append((file.st_mtime_ns, file.st_size, file.st_ino))
    return traces
