"""Folders whose entries outlive a loss of power."""

import os
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
