"""Chunks, the parts of checkpoint files. Each has rows or dirty rows of one table, or log records.

    header     magic, format, table, rows, size of the content
    stamps     int64 [n], negative for deleted rows; of dirty rows, the versions since which they are dirty
    content    the `Rows` message, without values for dirty rows; or log records
    checksum   64 bits over all of this, the file's name and the chunk's place in the file

The checksum detects a flipped bit, a chunk at another place and a file under another name. The size in the
manifest detects a truncated file.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltasync.base.errors import StorageFailed
from deltasync.core.changes import Stamps
from deltasync.core.rows import Ids, RowBatch, contiguous
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import ID_TYPE, Shard, TableSpec
from deltasync.wire.row_messages import Columns, Pieces, before_values, rows_pieces

# Fits a core's cache, because rows are read from the file, checked and copied one after the other.
CHUNK_BYTES = 1 << 20

_MAGIC, _FORMAT = b"dsck", 1
_HEADER, _CHECKSUM = struct.Struct("<4sIIIQ"), struct.Struct("<Q")
_RECORD = struct.Struct("<HQIIQ")  # Length of the stream's name, number, part, index, length of the payload.
_NO_STAMPS: Stamps = np.empty(0, np.int64)

LogRecord: TypeAlias = tuple[str, int, int, int, bytes]  # Stream, number, part, index, payload.


class CheckpointDamaged(StorageFailed):
    """A part of a checkpoint is missing or differs from what was written. Retrying does not help."""


class LaterFormat(StorageFailed):
    """A later version of deltasync wrote this; this one must leave it alone."""


@dataclass(frozen=True, eq=False)
class CheckpointChunk:
    """Rows or dirty rows of a table, or records of the log.

    Attributes:
        slot: the table's number in the checkpoint.
        stamps: [n], negative for deleted rows; of dirty rows, the versions since which they are dirty.
        content: a `Rows` message, or the records.
    """

    slot: int
    stamps: Stamps
    content: memoryview

    @property
    def ids(self) -> Ids:
        """The row ids, [n], ascending."""
        return np.frombuffer(Columns.read(self.content).ids, ID_TYPE)

    def rows(self, spec: TableSpec) -> RowBatch:
        """The rows for this table, as views of the message."""
        return Columns.read(self.content).rows_of(0, [Shard.whole(spec)])

    def records(self) -> Iterator[LogRecord]:
        """The log records."""
        packed, at = bytes(self.content), 0
        while at < len(packed):
            length, number, part, index, size = _RECORD.unpack_from(packed, at)
            name, at = at + _RECORD.size, at + _RECORD.size + length + size
            yield packed[name : name + length].decode(), number, part, index, packed[at - size : at]


@dataclass(frozen=True, eq=False)
class DamagedPart:
    """A part of a file that differs from what was written, up to the next sound chunk.

    Attributes:
        content: its bytes; empty if the rest of the file, or all of it, is missing.
    """

    content: memoryview

    def claimed(self) -> CheckpointChunk | None:
        """The chunk that it claims to be, of which nothing is proven; None if it is no single chunk."""
        if len(self.content) < _HEADER.size:
            return None
        _, _, slot, rows, size = _HEADER.unpack_from(self.content)
        if _length(rows, size) != len(self.content):
            return None
        return _unpacked(slot, rows, self.content)


def read_chunks(
    path: str, file: BinaryIO, size: int, damaged: Callable[[DamagedPart], None] | None = None
) -> Iterator[CheckpointChunk]:
    """Read the chunks of an open file of `size` bytes.

    `damaged` takes the parts that differ from what was written, and reading continues after them. Without it, the
    first such part is an error.
    """
    start = 0
    while start < size:
        if chunk := _next_chunk(path, file, start, size):
            _, version, slot, rows, _ = _HEADER.unpack_from(chunk)
            if version != _FORMAT:
                raise LaterFormat(f"{path} has format {version}, this version reads {_FORMAT}: update deltasync")
            yield _unpacked(slot, rows, chunk)
            start += len(chunk)
            continue
        if damaged is None:
            break
        file.seek(start)
        rest = memoryview(file.read(size - start))
        length = _next_sound(path, start, rest)
        damaged(DamagedPart(rest[:length]))
        start = start + length if length < len(rest) else size
        file.seek(start)
    if damaged is None and (start < size or file.read(1)):
        raise CheckpointDamaged(f"{path} is damaged at byte {start}")


def check_first_chunk(path: str, file: BinaryIO, size: int) -> None:
    """Check the format of an open file by its first chunk, which is read only if its header has another format."""
    head = file.read(_HEADER.size)
    if len(head) == _HEADER.size and _HEADER.unpack(head)[1] != _FORMAT:
        file.seek(0)
        next(read_chunks(path, file, size), None)


def _unpacked(slot: int, rows: int, chunk: memoryview) -> CheckpointChunk:
    stamps = np.frombuffer(chunk, np.int64, rows, _HEADER.size)
    return CheckpointChunk(slot, stamps, chunk[_HEADER.size + stamps.nbytes : -_CHECKSUM.size])


def _next_chunk(path: str, file: BinaryIO, start: int, size: int) -> memoryview | None:
    """Read the chunk at byte `start` of a file; None if it is damaged."""
    head = file.read(min(_HEADER.size, size - start))
    # The numbers of a damaged header may be anything, so use them only in ways that cannot fail.
    if not (length := _claimed_length(head)) or start + length > size:
        return None
    chunk = np.empty(length, np.uint8).data
    chunk[: _HEADER.size] = head
    read = file.readinto(chunk[_HEADER.size :])  # type: ignore[attr-defined]
    return chunk if read + _HEADER.size == length and _is_sound(path, start, chunk) else None


def _next_sound(path: str, start: int, rest: memoryview) -> int:
    """Where the next sound chunk begins in the rest of a file from byte `start`; the end if there is none.

    A damaged header does not tell the length of its chunk.
    """
    content, at = bytes(rest), 0
    while (at := content.find(_MAGIC, at + 1)) > 0:
        length = _claimed_length(content[at : at + _HEADER.size])
        if length and at + length <= len(rest) and _is_sound(path, start + at, rest[at : at + length]):
            return at
    return len(rest)


def _claimed_length(head: bytes) -> int:
    """The length of a chunk according to its header; 0 if it is no header."""
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        return 0
    _, _, _, rows, content = _HEADER.unpack(head)
    return _length(rows, content)


def _is_sound(path: str, start: int, chunk: memoryview) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(chunk, len(chunk) - _CHECKSUM.size)
    return bool(checksum == _checksum(path, start, chunk))


def packed_records(records: Iterable[LogRecord]) -> Iterator[bytes]:
    """Pack log records for `ChunkFile.add_records`, in pieces of about `CHUNK_BYTES`."""
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
    """A file that is being filled in memory. It has at most `most_bytes`, or a single larger chunk."""

    def __init__(self, most_bytes: int) -> None:
        self._room: NDArray[np.uint8] = np.empty(most_bytes, np.uint8)
        self._ends = [0]

    @property
    def nbytes(self) -> int:
        """Size of the present chunks in bytes."""
        return self._ends[-1]

    def take_memory(self) -> None:
        """Make the system allocate the memory now rather than while the file is filled."""
        self._room.fill(0)

    def clear(self) -> None:
        """Start an empty file in the same memory."""
        self._ends = [0]

    def add_rows(self, slot: int, table: StampedTable, ids: Ids, *, deleted: bool) -> bool:
        """Add rows ([n], ascending) of a table, all deleted or all live. Return whether there was room."""
        spec, slots = table.spec, table.locate(ids)
        run = contiguous(slots)
        where = slots if run is None else run
        if deleted:
            pieces = rows_pieces(RowBatch.deletes(Shard.whole(spec), ids))
            return self._add(slot, table.stamps[where], pieces) is not None
        size = len(ids) * spec.dim * spec.dtype.itemsize
        pieces = before_values(ids, table.digests[where], size)
        if (values := self._add(slot, table.stamps[where], pieces, size)) is None:
            return False
        table.read(ids, np.frombuffer(values, spec.dtype).reshape(len(ids), spec.dim))
        return True

    def add_dirty(self, slot: int, ids: Ids, since: Stamps) -> bool:
        """Add dirty rows ([n], ascending) of a table. Return whether there was room."""
        return self._add(slot, since, before_values(ids, None, 0)) is not None

    def add_records(self, packed: bytes) -> bool:
        """Add log records. Return whether there was room."""
        return self._add(0, _NO_STAMPS, [packed]) is not None

    def _add(self, slot: int, stamps: Stamps, pieces: Pieces, left: int = 0) -> memoryview | None:
        """Add a chunk. Return the last `left` bytes of its content, for the caller to fill; None without room."""
        size = sum(map(len, pieces)) + left
        start, length = self.nbytes, _length(len(stamps), size)
        if start and start + length > len(self._room):
            return None
        if length > len(self._room):
            self._room = np.empty(length, np.uint8)
        self._ends.append(start + length)
        room = self._room[start : start + length - _CHECKSUM.size].data
        header = _HEADER.pack(_MAGIC, _FORMAT, slot, len(stamps), size)
        for piece in (header, stamps.data.cast("B"), *pieces):
            room[: len(piece)] = piece
            room = room[len(piece) :]
        return room

    def content(self, name: str) -> memoryview:
        """The content of the file `name`: all chunks with their checksums."""
        for start, end in pairwise(self._ends):
            chunk = self._room[start:end].data
            _CHECKSUM.pack_into(chunk, len(chunk) - _CHECKSUM.size, _checksum(name, start, chunk))
        return self._room[: self.nbytes].data


def _length(rows: int, content: int) -> int:
    return _HEADER.size + rows * 8 + content + _CHECKSUM.size


def _checksum(path: str, start: int, chunk: memoryview) -> int:
    seed = xxhash.xxh3_64_intdigest(f"{path.rpartition('/')[2]} {start}".encode())
    return xxhash.xxh3_64_intdigest(chunk[: -_CHECKSUM.size], seed)
