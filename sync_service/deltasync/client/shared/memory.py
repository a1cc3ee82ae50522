"""Files in shared memory: mapping them, and locking single bytes of them."""

import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.client.shared import layout

_FLOCK = struct.Struct("hhqqi4x")


class Mapping:
    """A mapped file.

    Attributes:
        fd: its descriptor.
        size: its size in bytes.
    """

    def __init__(self, path: str | Path, *, write: bool = False, dir_fd: int | None = None) -> None:
        """Map a file, for reading only unless `write`. The path is relative to a folder's descriptor, if any."""
        self.fd = -1
        self.fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC, dir_fd=dir_fd)
        self.size = os.fstat(self.fd).st_size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self._memory = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED, access) if self.size else None

    def __del__(self) -> None:
        """Close the descriptor. The memory stays mapped while arrays refer to it."""
        if self.fd >= 0:
            os.close(self.fd)

    def array(self, dtype: Any, shape: tuple[int, ...] = (1,), offset: int = 0) -> NDArray[Any]:
        """An array over the memory, which stays mapped as long as the array exists."""
        if self._memory is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._memory, dtype, int(np.prod(shape)), offset).reshape(shape)

    def use_huge_pages(self) -> None:
        """Ask the system for huge pages. It may have none."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_HUGEPAGE)


def side_of(control: Mapping, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
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
