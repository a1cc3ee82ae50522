"""Files mapped into memory. Unlike `mmap.mmap` and `np.memmap`, a mapping keeps no descriptor of its file.

A shared mapping is the file: the system writes what has changed when it likes. In a private one it is the file as
long as nothing was written, and memory of this process from there on, page by page, until it is flushed.
"""

import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import StorageFailed
from deltasync.kernels import touched as kernels
from deltasync.kernels.touched import Bytes, Marks
from deltasync.storage.files import writing
from deltasync.storage.private_memory import PrivateMemory, memory_bytes

PRIVATE = PrivateMemory(memory_bytes())
_PAGE = mmap.PAGESIZE
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
        name: of the file, as errors call it; if it is mapped privately, its path.
        size: bytes.
        private: whether what is written goes to the file only with `flush`.
    """

    def __init__(
        self, descriptor: int, size: int, name: str, *, private: bool = False, empty: bool = False
    ) -> None:
        """Map `size` bytes, 1 or more, of a file that has as many. The descriptor may be closed afterwards.

        If they are to be `private`, and the system does not promise as much memory, they are shared all the same.
        Private ones of a file that is `empty`, all zero, are not read from it.

        Raises:
            StorageFailed: there is no room in the process's memory.
        """
        self.name, self.size, self.private = name, size, private
        access = mmap.PROT_READ | mmap.PROT_WRITE
        alone = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if empty else 0)
        for flags in ([alone] if private else []) + [mmap.MAP_SHARED]:
            self._address = _c.mmap(None, size, access, flags, descriptor, 0)
            self.private = flags == alone
            if self._address != _FAILED:
                break
        else:
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

    def flush(self, touched: "Sequence[TouchedArray]") -> None:
        """Wait until everything written before the call is on disk: where it is private, to these arrays.

        Raises:
            StorageFailed: the disk refused it.
        """
        with writing(f"{self.name} cannot be flushed", Path(self.name)):
            if self.private:
                self._write(touched)
            elif _c.msync(self._address, self.size, _MS_SYNC):
                raise OSError(number := ctypes.get_errno(), os.strerror(number))

    def _write(self, touched: "Sequence[TouchedArray]") -> None:
        with open(self.name, "r+b", buffering=0) as file:
            for each in touched:
                each.write(file.fileno(), each.content.ctypes.data - self._address)
            os.fdatasync(file.fileno())


@dataclass(frozen=True, eq=False)
class TouchedArray:
    """An array of a mapping, of which some blocks of rows were written.

    Attributes:
        content: its bytes [n].
        marks: by block, in `bit` whether it was written.
        bit: a power of 2.
        block_bytes: of each block; the last one may have fewer.
    """

    content: Bytes
    marks: Marks
    bit: int
    block_bytes: int

    def write(self, descriptor: int, offset: int) -> None:
        """Write these blocks to a file in which the array begins at a byte.

        Raises:
            OSError: the disk refused it.
        """
        done, content = 0, self.content
        while True:
            done = kernels.write(descriptor, offset, content, self.marks, self.bit, self.block_bytes, done)
            if done == len(content):
                return
            # Once more, since the kernel does not know why it was refused.
            done += os.pwrite(descriptor, content[done : done + _PAGE].data, offset + done)


def map_file(path: Path, *, empty: bool = False) -> Mapping:
    """A whole file, of 1 byte or more: private as long as there is memory. An `empty` one is all zero.

    Raises:
        StorageFailed: there is no room in the process's memory.
    """
    size = path.stat().st_size
    with path.open("r+b") as file:
        private = PRIVATE.take(size)
        mapping = Mapping(file.fileno(), size, str(path), private=private, empty=empty)
    if mapping.private:
        weakref.finalize(mapping, PRIVATE.give_back, size).atexit = False
    elif private:
        PRIVATE.give_back(size)
    return mapping


def _words(number: int) -> str:
    text = os.strerror(number)
    return (
        f"{text}: raise vm.max_map_count, or the limits of its memory (ulimit -v)"
        if number == errno.ENOMEM
        else text
    )
