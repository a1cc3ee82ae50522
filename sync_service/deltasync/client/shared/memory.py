"""Files in shared memory: mapping them, and locking single bytes of them."""

import errno
import fcntl
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.client.shared import layout

# Of <linux/mman.h>, since Linux 5.14.
_MADV_POPULATE_WRITE = 23
_FLOCK = struct.Struct("hhqqi4x")


class MappedFile:
    """A mapped file. Its memory has one descriptor.

    Attributes:
        size: its size in bytes.
    """

    def __init__(self, path: str | Path, *, write: bool = False, dir_fd: int | None = None) -> None:
        """Map a file, for reading only unless `write`. A `path` may be relative to the open folder `dir_fd`.

        Raises:
            OSError: it cannot be opened, or is a link.
            ValueError: it is empty.
        """
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            self.size = os.fstat(fd).st_size
            access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            self._memory = mmap.mmap(fd, self.size, mmap.MAP_SHARED, access)
        finally:
            os.close(fd)

    def array(self, dtype: Any, shape: tuple[int, ...] = (1,), offset: int = 0) -> NDArray[Any]:
        """An array over the memory, which stays mapped as long as the array exists.

        Raises:
            ValueError: the file is shorter.
        """
        return np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)

    def fill_with_huge_pages(self) -> None:
        """Give a sparse file its memory, as huge pages where the file system has them.

        Raises:
            OSError: there is no room, or the system is too old for it.
        """
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EFAULT:  # A write would kill the process, because the file system is full.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


def inode_of_control(folder: int) -> int:
    """The inode of the file `control` in an open folder."""
    return os.stat(layout.CONTROL, dir_fd=folder, follow_symlinks=False).st_ino


def is_in_place(path: Path, folder: int, control: int | None = None) -> bool:
    """Whether an open folder still has its path and, unless it is None, the inode of its file `control`.

    A path that this process may not look up any more does not count.
    """
    try:
        is_there = os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(folder))
        return is_there and (control is None or control == inode_of_control(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def with_remedy(error: OSError) -> str:
    """The reason why a file cannot be used, with the remedy if the process has too many open files."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{reason}: allow more (ulimit -n), because each table needs up to six files"
    return reason


def side_of(control: MappedFile, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The description [1] of a side in the file `control`, and those of its tables."""
    offset = layout.side_offset(number)
    tables = control.array(layout.TABLE, (layout.MOST_TABLES,), offset + layout.SIDE.itemsize)
    return control.array(layout.SIDE, offset=offset), tables


def lock_byte(fd: int, byte: int) -> bool:
    """Lock a byte of a file until the descriptor and its copies in forked processes are closed.

    Returns:
        Whether it was free.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError:
        return False
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Whether another descriptor has a lock on a byte of a file."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
