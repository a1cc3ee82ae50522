"""The files of a mirror in shared memory: their layout, version 2, and how to map and lock them.

`deltasync_shared.h` has the same layout in C. All numbers are little-endian and aligned. A mirror NAME is a folder
`DIRECTORY/deltasync-NAME` with these files:

control     the header, and a description of each of the two sides with its tables. Only the mirror writes it.
writer      empty; the mirror locks it
readers     one entry for each thread that reads a whole version. Readers write it.
HEX         an array of a table on one side: its rows, the mask of existing rows, or its index of raw ids

The mirror writes a release into the side that is not served, serves it, and then writes the other side. A side's
sequence number is odd while the mirror writes the side. To copy rows, read `served`, the sequence number of that
side, the rows, and the sequence number again. If it is odd or has changed, the rows may be torn: start again.

To use a whole version for longer, pin its side with an entry in `readers`, and then read `served` again. The
mirror waits before it writes a pinned side, but no longer than its limit. So compare the sequence number after
use as well. After the limit, the mirror ignores the entry until it has seen it without a pin.

The header has the next file number, because no number is used twice. An array's file never changes its size. If a
file is missing, the side has changed meanwhile. Every reader may change `readers`, also its size: do not map it.
"""

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

from deltasync.core.position import Position
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

MAGIC = b"DELTASHM"
VERSION = 2
CONTROL, WRITER, READERS = "control", "writer", "readers"
DIRECTORY = Path("/dev/shm")  # noqa: S108  # the shared memory of the host
MOST_TABLES = 1024
MOST_READERS = 1024
NAME_BYTES = 512


def _record(size: int, **fields: tuple[str, int]) -> np.dtype[np.void]:
    """A record of `size` bytes with fields of a format, each at an offset."""
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": size})


# The mirror writes `alive_ns` about every second, by CLOCK_BOOTTIME, which all containers of a host share. It is 0
# once the mirror has stopped.
HEADER = _record(
    4096,
    magic=("S8", 0),
    layout=("<u4", 8),
    served=("<u8", 64),
    alive_ns=("<i8", 72),
    state_sequence=("<u8", 80),
    ready=("<u8", 88),
    next_file=("<u8", 96),
    model=("S512", 128),
    consumer=("S512", 640),
    reason=("S1024", 1152),
)
SIDE = _record(
    1024,
    sequence=("<u8", 0),
    tables=("<u8", 8),
    version=("<u8", 16),
    step=("<i8", 24),
    step_end_unix_ns=("<i8", 32),
    event_time_unix_ns=("<i8", 40),
    number=("<u8", 48),
    seal=("<u8", 56),
    history=("S128", 64),
    kept=("S512", 192),
)
# `of` is the table to which a map belongs. `dtype` is NumPy's, for example `<f4`. `value_type` is the number of a
# `ValueType` if rows are encoded, with `table_dim` values in each; else 0. `there` is the file of a mask of
# existing rows, a byte for each. `index` is the file of an index of raw ids (see `kernels/keys.py`): `index_slots`
# pairs of int64, a raw id and its row, and then the salt, two int64. Without raw ids, both are 0.
TABLE = _record(
    1152,
    name=("S512", 0),
    of=("S512", 512),
    kind=("<u4", 1024),
    dtype=("S8", 1032),
    dim=("<u4", 1040),
    row_bytes=("<u4", 1044),
    rows=("<u8", 1048),
    file=("<u8", 1056),
    there=("<u8", 1064),
    index=("<u8", 1072),
    index_slots=("<u8", 1080),
    value_type=("<u4", 1088),
    table_dim=("<u4", 1092),
)
FILES = "file", "there", "index"  # The fields of TABLE that name files.
# A thread owns an entry while it has a lock on its byte in `readers`: an open file description lock, which ends
# with the process. `side` is 0, or 1 + the pinned side; `pid` tells one reader from the next.
READER = _record(64, side=("<u8", 0), pid=("<u8", 8))

SIDE_BYTES = SIDE.itemsize + MOST_TABLES * TABLE.itemsize
CONTROL_BYTES = HEADER.itemsize + 2 * SIDE_BYTES
READERS_BYTES = MOST_READERS * READER.itemsize


def folder_of(name: str, directory: Path = DIRECTORY) -> Path:
    """The folder of a mirror."""
    return directory / f"deltasync-{name}"


def file_name(number: int) -> str:
    """The name of the file of an array."""
    return f"{number:x}"


def side_offset(side: int) -> int:
    """Where a side begins in `control`."""
    return HEADER.itemsize + side * SIDE_BYTES


def spec_of(described: Any) -> TableSpec:
    """The table in a description; a ValueError if the description is damaged."""
    try:
        name, rows, dim = described["name"].decode(), int(described["rows"]), int(described["dim"])
        dtype, kind = np.dtype(described["dtype"].decode()), TableKind.of_number(int(described["kind"]))
        if (slots := int(described["index_slots"])) & (slots - 1):
            raise ValueError(f"table {name!r} has an index of {slots} slots")
        if (value_type := ValueType.of_number(int(described["value_type"]))) is not None:
            table_dim = int(described["table_dim"])
            return ReplicaSpec(name, rows, dim, dtype, value_type=value_type, table_dim=table_dim)
        if kind is None:
            raise ValueError(f"table {name!r} is of kind {described['kind']}")
        return TableSpec(name, rows, dim, dtype, kind, described["of"].decode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"its description of a table is damaged: {error}") from error


def reading_of(side: NDArray[Any]) -> dict[str, Any]:
    """The fields of `Reading` of a side [1] with a version; a ValueError if they are damaged."""
    shown = side[0]
    return {
        "position": Position(shown["history"].decode(), int(shown["number"]), int(shown["seal"])),
        "version": int(shown["version"]),
        "step": int(shown["step"]),
        "step_end_unix_ns": int(shown["step_end_unix_ns"]),
        "event_time_unix_ns": int(shown["event_time_unix_ns"]) or None,
        "kept": shown["kept"].decode(),
    }


# Of <linux/mman.h>, since Linux 5.14.
_MADV_POPULATE_WRITE = 23
_FLOCK = struct.Struct("hhqqi4x")


class MappedFile:
    """A mapped file of `size` bytes. Its memory has one descriptor."""

    def __init__(self, path: str | Path, *, write: bool = False, dir_fd: int | None = None) -> None:
        """Map a file, in the open folder `dir_fd` if given. It may not be a link. If it is empty: ValueError."""
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            self.size = os.fstat(fd).st_size
            access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            self._memory = mmap.mmap(fd, self.size, mmap.MAP_SHARED, access)
        finally:
            os.close(fd)

    def array(self, dtype: Any, shape: tuple[int, ...] = (1,), offset: int = 0) -> NDArray[Any]:
        """An array over the memory, which stays mapped while the array exists; a ValueError if it is short."""
        return np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)

    def fill_with_huge_pages(self) -> None:
        """Give a sparse file its memory, as huge pages where the file system has them."""
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EFAULT:  # A write would kill the process, because the file system is full.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


def inode_of_control(folder: int) -> int:
    """The inode of the file `control` in an open folder."""
    return os.stat(CONTROL, dir_fd=folder, follow_symlinks=False).st_ino


def is_in_place(path: Path, folder: int, control: int | None = None) -> bool:
    """Whether an open folder still has its path and the inode of its file `control`, unless that is None.

    A path that this process may no longer look up counts as moved.
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
    offset = side_offset(number)
    tables = control.array(TABLE, (MOST_TABLES,), offset + SIDE.itemsize)
    return control.array(SIDE, offset=offset), tables


def lock_byte(fd: int, byte: int) -> bool:
    """Lock a byte until the descriptor and its copies in forked processes are closed; False if it is locked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError:
        return False
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Whether another descriptor has a lock on a byte of a file."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
