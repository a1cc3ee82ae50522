"""Folders for tests."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it have names of their own
_ENOUGH = 4 << 30


def fast_folder() -> "TemporaryDirectory[str]":
    """A folder in memory where the machine has it, for tests of many examples: none of them waits for a disk.

    What is written is lost with the power, which such a test can only play anyway.
    """
    return TemporaryDirectory(dir=_MEMORY if _has_room() else None)


def keep_folders_in_memory() -> None:
    """Have `tmp_path` of all tests there too, unless TMPDIR says where."""
    if "TMPDIR" not in os.environ and _has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def _has_room() -> bool:
    """For folders, also of programs."""
    if not _MEMORY.is_dir():
        return False
    volume = os.statvfs(_MEMORY)
    return volume.f_bavail * volume.f_frsize >= _ENOUGH and not volume.f_flag & os.ST_NOEXEC
