"""Files mapped into memory. Unlike `mmap.mmap` and `np.memmap`, a mapping keeps no descriptor of its file."""

import ctypes
import errno
import math
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import StorageFailed

_MS_SYNC = 4  # sys/mman.h
_FAILED = ctypes.c_void_p(-1).value
_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_c.msync.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_c.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t


class Mapping:
    """The first bytes of a file, to be read and written as arrays. Unmapped once none of these is left.

    Attributes:
        name: of the file, as errors call it.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int, name: str) -> None:
        """Map `size` bytes, 1 or more, of a file that has as many. The descriptor may be closed afterwards.

        Raises:
            StorageFailed: there is no room in the process's memory.
        """
        self.name, self.size = name, size
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _c.mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
        if self._address == _FAILED:
            raise StorageFailed(f"{name} cannot be mapped: {_words(ctypes.get_errno())}")
        # What NumPy asks for; its array refers to this object.
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (self._address, False),
        }
        # Not at exit: daemon threads may still be reading.
        weakref.finalize(self, _c.munmap, self._address, size).atexit = False

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """An array of what is there from byte `offset` on."""
        end = offset + math.prod(shape) * dtype.itemsize
        return np.asarray(self)[offset:end].view(dtype).reshape(shape)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk.

        Raises:
            StorageFailed: the disk refused it.
        """
        if _c.msync(self._address, self.size, _MS_SYNC):
            raise StorageFailed(f"{self.name} cannot be flushed: {os.strerror(ctypes.get_errno())}")


def map_file(path: Path) -> Mapping:
    """A whole file, which is not empty.

    Raises:
        StorageFailed: there is no room in the process's memory.
    """
    with path.open("r+b") as file:
        return Mapping(file.fileno(), path.stat().st_size, str(path))


def _words(number: int) -> str:
    text = os.strerror(number)
    return f"{text}: see vm.max_map_count, or limits of its memory" if number == errno.ENOMEM else text
