"""Folders for tests."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it have names of their own
_ENOUGH = 4 << 30


def fast_folder() -> "TemporaryDirectory[str]":
    """A folder in memory, if the machine has one, so that tests with many examples do not wait for a disk.

    Its content would not survive a power failure, which such a test only simulates anyway.
    """
    return TemporaryDirectory(dir=_MEMORY if _has_room() else None)


def keep_folders_in_memory() -> None:
    """Put the `tmp_path` of all tests into memory too, unless TMPDIR is set."""
    if "TMPDIR" not in os.environ and _has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def _has_room() -> bool:
    """Whether a folder has enough space and allows programs."""
    if not _MEMORY.is_dir():
        return False
    volume = os.statvfs(_MEMORY)
    return volume.f_bavail * volume.f_frsize >= _ENOUGH and not volume.f_flag & os.ST_NOEXEC
