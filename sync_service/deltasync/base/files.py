"""Folders and files on disk: durable folders, permissions, and watching for changes."""

import asyncio
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from deltasync.base.errors import InvalidInput


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents durably, unless it exists."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        flush(each.parent)
    if not missing:
        path.mkdir(exist_ok=True)  # Raises if it is a file.


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable_by_all(path: Path) -> bool:
    """Whether every user of the machine may read a file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error


class FileWatch:
    """Watches files for changes: rewritten, replaced, or reached through a changed link.

    Create it before the files are first read, so that it notices changes during the reading.
    """

    def __init__(self, paths: Iterable[Path], seconds: float = 1.0) -> None:
        self._paths = tuple(paths)
        self._seconds = seconds
        self._seen = _traces(self._paths)

    async def changed(self) -> None:
        """Wait until a file differs from its state when this last returned or was created.

        It checks in a thread, because a disk may be slow.
        """
        while True:
            await asyncio.sleep(self._seconds)
            traces = await asyncio.to_thread(_traces, self._paths)
            if traces != self._seen:
                self._seen = traces
                return


def _traces(paths: tuple[Path, ...]) -> list[tuple[int, int, int] | None]:
    """Modification time, size and inode of each file, following links; None for one that is not accessible."""
    traces = list[tuple[int, int, int] | None]()
    for path in paths:
        try:
            file = path.stat()
        except OSError:
            traces.append(None)
        else:
            traces.append((file.st_mtime_ns, file.st_size, file.st_ino))
    return traces
