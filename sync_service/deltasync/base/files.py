"""Folders and files on disk: made, listed, and watched for changes."""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path


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


_SECONDS = 1.0


class FileWatch:
    """Files that may change: written anew, put in another's place, or behind a link that leads elsewhere by now.

    To be made before the files are first read: what changes while they are is noticed, then.
    """

    def __init__(self, paths: Iterable[Path], seconds: float = _SECONDS) -> None:
        self._paths = tuple(paths)
        self._seconds = seconds
        self._seen = _traces(self._paths)

    async def changed(self) -> None:
        """Wait until one of the files is not what it was when this was made, or last returned. They are looked at
        in a thread: a disk may be slow.
        """
        while True:
            await asyncio.sleep(self._seconds)
            found = await asyncio.to_thread(_traces, self._paths)
            if found != self._seen:
                self._seen = found
                return


def _traces(paths: tuple[Path, ...]) -> list[tuple[int, int, int] | None]:
    """What tells each file, by its end of links, from itself after a change; None of one that cannot be seen."""
    return [_trace(path) for path in paths]


def _trace(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
