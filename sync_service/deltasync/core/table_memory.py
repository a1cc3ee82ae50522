"""Memory for the arrays of tables: plain memory, or scratch files that may exceed memory.

The service checks for room before it allocates. A table that does not fit then causes an error with both sizes,
instead of an out-of-memory kill in the middle of a cut.
"""

import ctypes
import math
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deltasync.base.errors import StorageFailed
from deltasync.base.process import private_bytes

# A process may have only 65,530 mappings (vm.max_map_count), so small arrays come from malloc.
_SMALL_BYTES = 1 << 20
# A model may have thousands of small tables, and checking the system takes a millisecond.
_FRESH_SECONDS = 1.0
# Tables leave this share of a volume or of the machine's memory free, but at most this number of bytes.
_KEPT_SHARE, _KEPT_BYTES = 16, 1 << 30

_CGROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_MADV_HUGEPAGE = 14  # sys/mman.h
_FAILED = ctypes.c_void_p(-1).value
_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_c.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_c.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class NoTableMemory(StorageFailed):
    """There is no room for a table at present; there may be once other memory is freed."""


class Room(NamedTuple):
    """Free and total bytes of a volume or of memory."""

    free: int
    total: int

    @property
    def for_tables(self) -> int:
        """Bytes that tables may still allocate."""
        return max(0, self.free - min(_KEPT_BYTES, self.total // _KEPT_SHARE))


class TableMemory:
    """Where the arrays of tables are. Safe to use from any thread.

    Arrays free their memory once nothing refers to them. Nothing outlives the process.
    """

    def __init__(
        self,
        folder: Path | None = None,
        room: "Callable[[], Room | None] | None" = None,
        private: Callable[[], int] = private_bytes,
        fresh_seconds: float = _FRESH_SECONDS,
    ) -> None:
        """Use plain memory, or nameless scratch files in `folder`. `room` reads the system's free bytes, `private`
        those that this process has written; small arrays rely on a check for `fresh_seconds`.
        """
        self._folder, self._private, self._fresh_seconds = folder, private, fresh_seconds
        self._room = room or (partial(_volume_room, folder) if folder else memory_room)
        # Promised bytes that the system may still count as free: files that are being reserved, and all allocated
        # memory, since the system assigns pages at the first write.
        self._promised = 0
        # Garbage collection may free an array, and lower this count, while the same thread holds the lock.
        self._lock = threading.RLock()
        # Bytes that small tables may take until a time, by `time.monotonic`, without checking the system again.
        self._left, self._until = 0, 0.0

    def check(self, nbytes: int, what: str) -> None:
        """Check that there is room for `nbytes` of `what`, without allocating it."""
        if nbytes < _SMALL_BYTES and self._was_left(nbytes):
            return
        if (room := self._room()) is None:
            return
        promised = self._promised if self._folder else max(0, self._promised - self._private())
        free = max(0, room.for_tables - promised)
        if nbytes <= free:
            with self._lock:
                self._left, self._until = free - nbytes, time.monotonic() + self._fresh_seconds
            return
        where = f"on the volume of {self._folder}" if self._folder else "of memory"
        remedy = (
            "make room on it, or place tables in another folder (--table-memory)"
            if self._folder
            else "give the service more memory, or place tables in files of a folder (--table-memory DIR)"
        )
        needed = f"it takes {nbytes} bytes, and {free} bytes {where} are free"
        raise NoTableMemory(f"no room for {what}: {needed}: {remedy}")

    def _was_left(self, nbytes: int) -> bool:
        """Whether the last check of the system, if recent, left room for `nbytes`."""
        with self._lock:
            enough = nbytes <= self._left and time.monotonic() < self._until
            self._left -= nbytes if enough else 0
            return enough

    def zeros(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """A new array, all zero."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return np.zeros(shape, dtype)
        with self._lock:
            self.check(nbytes, f"an array of {' x '.join(map(str, shape))} {dtype} values")
            self._promised += nbytes
        try:
            mapping = self._mapping(nbytes)
        except BaseException:
            self._count(-nbytes)
            raise
        if self._folder:
            self._count(-nbytes)
        else:
            weakref.finalize(mapping, self._count, -nbytes).atexit = False
        return np.asarray(mapping).view(dtype).reshape(shape)

    def _mapping(self, nbytes: int) -> "_Mapping":
        if self._folder is None:
            return _Mapping(-1, nbytes, "memory")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                # If the disk is full, this fails. Otherwise a write to the array would cause a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return _Mapping(file.fileno(), nbytes, f"a file in {self._folder}")
        except OSError as error:
            reason = error.strerror or str(error)
            raise NoTableMemory(
                f"cannot reserve {nbytes} bytes for tables in {self._folder}: {reason}: "
                "make room on its volume, or place tables in another folder (--table-memory)"
            ) from error

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._promised += nbytes


class _Mapping:
    """Mapped memory with zeros, unmapped once no array refers to it. It keeps no file descriptor."""

    def __init__(self, descriptor: int, size: int, what: str) -> None:
        """Map `size` bytes of a file of that size, or plain memory if the descriptor is -1."""
        plain = descriptor < 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if plain else mmap.MAP_SHARED
        address = _c.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _FAILED:
            raise NoTableMemory(
                f"cannot map {size} bytes of {what} for tables: {os.strerror(ctypes.get_errno())}: give the "
                "process more memory (ulimit -v, vm.overcommit_memory) or more mappings (vm.max_map_count)"
            )
        if plain:
            # Without huge pages, each random row of a large table costs a page-table walk. A refusal is harmless.
            _c.madvise(address, size, _MADV_HUGEPAGE)
        # The interface that NumPy reads; its array refers to this object.
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}
        # Not at exit, because daemon threads may still be reading.
        weakref.finalize(self, _c.munmap, address, size).atexit = False


def memory_room(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> Room | None:
    """Memory that this process may still allocate: the machine's, or less if a control group (v1 or v2) limits it.

    None if neither is readable. File pages that the system could drop count as free.
    """
    info = _numbers(proc / "meminfo")
    rooms = [Room(info["MemAvailable"] << 10, info["MemTotal"] << 10)] if "MemAvailable" in info else []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            rooms += _group_rooms(cgroups, group, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            rooms += _group_rooms(cgroups / "memory", group, *names)
    return min(rooms, key=lambda room: room.for_tables, default=None)


def _group_rooms(root: Path, group: str, limit: str, usage: str, prefix: str) -> list[Room]:
    """The room in a control group and its parents. In a container, the root is its own group."""
    inner, rooms = root / group.lstrip("/"), list[Room]()
    for folder in (each for each in (inner, *inner.parents) if each.is_relative_to(root)):
        total, used = (_text(folder / name).strip() for name in (limit, usage))
        if total.isdigit() and used.isdigit():  # Otherwise "max", or the root of all groups.
            numbers = _numbers(folder / "memory.stat")
            cached = sum(numbers.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            rooms.append(Room(max(0, int(total) - int(used) + cached), int(total)))
    return rooms


def _numbers(path: Path) -> dict[str, int]:
    """Parse the lines `name number` or `name: number` of a system file."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def _text(path: Path) -> str:
    """Read a system file; empty if it is not readable."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _volume_room(path: Path) -> Room | None:
    try:
        volume = os.statvfs(next(each for each in (path, *path.parents) if each.exists()))
    except OSError:  # The device is gone. Allocating on it will report the error.
        return None
    return Room(volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize)


RAM = TableMemory()
