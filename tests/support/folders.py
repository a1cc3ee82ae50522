"""Folders for tests."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it have names of their own
_ENOUGH = 1 << 30


def fast_folder() -> "TemporaryDirectory[str]":
    """A folder in memory where the machine has it, for tests of many examples: none of them waits for a disk.

    What is written is lost with the power, which such a test can only play anyway.
    """
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ENOUGH
    return TemporaryDirectory(dir=_MEMORY if in_memory else None)
