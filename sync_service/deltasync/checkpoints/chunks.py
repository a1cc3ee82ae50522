"""Chunks: what files of checkpoints are made of. Each has rows or dirty rows of one table, or log records.

    header     magic, format, flags, table, bytes of a row's values, rows, first id
    ids        int64 [n]; left out where they follow the first one without a gap
    stamps     int64 [n], negative for deleted rows; of dirty rows, the versions since which they are dirty
    digests    uint64 [n]; left out for deleted and for dirty rows
    values     [n, bytes of a row]; left out for deleted and for dirty rows
    zeros      up to a multiple of 8 bytes
    checksum   64 bits of all that, of the file's name and of the chunk's place in the file

So a flipped bit, a chunk at another place and a file under another name are found. A file that ends early is found
by its size, which the manifest has.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltasync.base.errors import StorageFailed
from deltasync.core.changes import Stamps
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, contiguous
from deltasync.core.stamped_table import StampedTable

FILE_BYTES = 32 << 20
# Fits a core's cache: rows are read from the file, checked and copied one after the other.
CHUNK_BYTES = 1 << 20

_MAGIC, _FORMAT = b"dsck", 1
_HEADER, _CHECKSUM = struct.Struct("<4sHHIIQq"), struct.Struct("<Q")
_ONLY_STAMPS, _RUN, _RECORDS = 1, 2, 4
_RECORD = struct.Struct("<HQIIQ")  # Length of the stream's name, number, part, index, length of the payload.

Bytes: TypeAlias = NDArray[np.uint8]
LogRecord: TypeAlias = tuple[str, int, int, int, bytes]  # Stream, number, part, index, payload.


class CheckpointDamaged(StorageFailed):
    """Something of a checkpoint is missing, or is not what was written: another try finds the same."""


@dataclass(frozen=True, eq=False)
class CheckpointChunk:
    """Rows of a table. A chunk with records of the log has them in `values`.

    Attributes:
        slot: the table's number in the checkpoint.
        ids: [n], ascending.
        stamps: [n], negative for deleted rows; of dirty rows, the versions since which they are dirty.
        digests: [n]; 0 for deleted and for dirty rows.
        values: [n, bytes of a row]; None if the rows are deleted or dirty ones.
    """

    slot: int
    ids: Ids
    stamps: Stamps
    digests: RowDigests
    values: Bytes | None

    def records(self) -> Iterator[LogRecord]:
        """The records."""
        packed, at = b"" if self.values is None else self.values.tobytes(), 0
        while at < len(packed):
            length, number, part, index, size = _RECORD.unpack_from(packed, at)
            name, at = at + _RECORD.size, at + _RECORD.size + length + size
            yield packed[name : name + length].decode(), number, part, index, packed[at - size : at]


def read_chunks(path: str, file: BinaryIO, size: int) -> Iterator[CheckpointChunk]:
    """The chunks of an open file, which must have `size` bytes.

    Raises:
        CheckpointDamaged: it is not what was written, as far as it was read.
    """
    start = 0
    while head := file.read(min(_HEADER.size, size - start)):
        if len(head) < _HEADER.size:
            break
        magic, version, flags, slot, width, rows, first = _HEADER.unpack(head)
        # Of a damaged header the numbers may be anything: nothing is done with them that could go wrong.
        length = _length(flags, rows, width)
        if magic != _MAGIC or start + length > size:
            break
        chunk: Bytes = np.empty(length, np.uint8)
        chunk[: _HEADER.size] = np.frombuffer(head, np.uint8)
        read = file.readinto(chunk[_HEADER.size :].data)  # type: ignore[attr-defined]
        (checksum,) = _CHECKSUM.unpack_from(chunk.data, length - _CHECKSUM.size)
        if read + _HEADER.size < length or checksum != _checksum(path, start, chunk):
            break
        if version != _FORMAT:
            raise StorageFailed(f"{path} is of format {version}, this version reads {_FORMAT}: update deltasync")
        ids, stamps, digests, values = _arrays(chunk, flags, rows, width)
        yield CheckpointChunk(
            slot,
            np.arange(first, first + rows) if flags & _RUN else ids,
            stamps,
            np.zeros(rows, np.uint64) if flags & _ONLY_STAMPS else digests,
            None if flags & _ONLY_STAMPS else values,
        )
        start += length
    if start < size or file.read(1):
        raise CheckpointDamaged(f"{path} is damaged at byte {start}")


def packed_records(records: Iterable[LogRecord]) -> Iterator[bytes]:
    """Records of the log as `ChunkFile.add_records` takes them, about `CHUNK_BYTES` together."""
    packed = bytearray()
    for stream, number, part, index, payload in records:
        name = stream.encode()
        packed += _RECORD.pack(len(name), number, part, index, len(payload)) + name + payload
        if len(packed) >= CHUNK_BYTES:
            yield bytes(packed)
            packed.clear()
    if packed:
        yield bytes(packed)


class ChunkFile:
    """A file as it is filled, in memory. It takes at most `FILE_BYTES`, or one chunk that is larger."""

    def __init__(self) -> None:
        self._room: Bytes = np.empty(FILE_BYTES, np.uint8)
        self._ends = [0]

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks so far."""
        return self._ends[-1]

    def take_memory(self) -> None:
        """Have the system give the memory now, and not as it is filled."""
        self._room.fill(0)

    def clear(self) -> None:
        """Begin again with an empty file, in the same memory."""
        self._ends = [0]

    def add_rows(self, slot: int, table: StampedTable, ids: Ids, *, deleted: bool) -> bool:
        """Add rows ([n], ascending) of a table, all of them deleted or none; returns whether there was room.

        Raises:
            DamagedRows: some do not fit their digests; nothing was added.
        """
        slots = table.locate(ids)
        run = contiguous(slots)
        where = slots if run is None else run
        if deleted:
            return self.add_stamps(slot, ids, table.stamps[where])
        flags = 0 if contiguous(ids) is None else _RUN
        width = table.spec.dim * table.spec.dtype.itemsize
        if (chunk := self._room_for(flags, slot, width, len(ids), int(ids[0]))) is None:
            return False
        own_ids, stamps, digests, values = _arrays(chunk, flags, len(ids), width)
        own_ids[:] = ids[: len(own_ids)]
        stamps[:] = table.stamps[where]
        table.read(ids, values.view(table.spec.dtype))
        digests[:] = table.digests[where]
        self._ends.append(self.nbytes + len(chunk))
        return True

    def add_stamps(self, slot: int, ids: Ids, stamps: Stamps) -> bool:
        """Add deleted or dirty rows ([n], ascending) of a table; returns whether there was room."""
        flags = _ONLY_STAMPS | (0 if contiguous(ids) is None else _RUN)
        if (chunk := self._room_for(flags, slot, 0, len(ids), int(ids[0]))) is None:
            return False
        own_ids, own_stamps, _, _ = _arrays(chunk, flags, len(ids), 0)
        own_ids[:], own_stamps[:] = ids[: len(own_ids)], stamps
        self._ends.append(self.nbytes + len(chunk))
        return True

    def add_records(self, packed: bytes) -> bool:
        """Add records of the log; returns whether there was room."""
        if (chunk := self._room_for(_RECORDS, 0, 1, len(packed), 0)) is None:
            return False
        _arrays(chunk, _RECORDS, len(packed), 1)[-1][:, 0] = np.frombuffer(packed, np.uint8)
        self._ends.append(self.nbytes + len(chunk))
        return True

    def content(self, name: str) -> memoryview:
        """All chunks, with their checksums: what the file of this name is to have."""
        for start, end in pairwise(self._ends):
            chunk = self._room[start:end]
            _CHECKSUM.pack_into(chunk.data, len(chunk) - _CHECKSUM.size, _checksum(name, start, chunk))
        return self._room[: self.nbytes].data

    def _room_for(self, flags: int, slot: int, width: int, rows: int, first: int) -> Bytes | None:
        """A chunk that has its header; None if there is no room for it."""
        start, length = self.nbytes, _length(flags, rows, width)
        if start and start + length > len(self._room):
            return None
        if length > len(self._room):
            self._room = np.empty(length, np.uint8)
        chunk = self._room[start : start + length]
        chunk[-2 * _CHECKSUM.size :] = 0  # With what is between values and checksum.
        _HEADER.pack_into(chunk.data, 0, _MAGIC, _FORMAT, flags, slot, width, rows, first)
        return chunk


def _sizes(flags: int, rows: int, width: int) -> tuple[int, int, int, int]:
    """Bytes of ids, stamps, digests and values."""
    if flags & _RECORDS:
        return 0, 0, 0, rows * width
    return 0 if flags & _RUN else rows * 8, rows * 8, 0 if flags & _ONLY_STAMPS else rows * 8, rows * width


def _length(flags: int, rows: int, width: int) -> int:
    used = _HEADER.size + sum(_sizes(flags, rows, width))
    return used + -used % 8 + _CHECKSUM.size


def _arrays(chunk: Bytes, flags: int, rows: int, width: int) -> tuple[Ids, Stamps, RowDigests, Bytes]:
    at, parts = _HEADER.size, list[Bytes]()
    for size in _sizes(flags, rows, width):
        parts.append(chunk[at : at + size])
        at += size
    return parts[0].view("<i8"), parts[1].view("<i8"), parts[2].view("<u8"), parts[3].reshape(-1, width or 1)


def _checksum(path: str, start: int, chunk: Bytes) -> int:
    seed = xxhash.xxh3_64_intdigest(f"{path.rpartition('/')[2]} {start}".encode())
    return xxhash.xxh3_64_intdigest(chunk[: len(chunk) - _CHECKSUM.size].data, seed)
