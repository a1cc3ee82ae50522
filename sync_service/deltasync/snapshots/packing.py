"""Writing the pieces of a snapshot, many to an object, and reading them again."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.snapshots.manifest import DATA, Piece, SnapshotDamaged, SnapshotTable, checksum_of
from deltasync.snapshots.place import SnapshotPlace

_OBJECT_BYTES = 32 << 20
_RECORD = struct.Struct("<HQIIQ")  # Length of the stream's name, number, part, index, length of the payload.

LogRecord = tuple[str, int, int, int, bytes]  # Stream, number, part, index, payload.


class PieceWriter:
    """Writes pieces of the snapshot `id` of a model; those that an earlier one has are not written again."""

    def __init__(self, place: SnapshotPlace, model: str, id: str, earlier: Iterable[Piece] = ()) -> None:  # noqa: A002
        self._place, self._prefix = place, f"{model}/{DATA}/{id}-"
        self._earlier = {(each.checksum, each.bytes): each for each in earlier}
        self._content, self._number = bytearray(), 0

    def add(self, content: bytes) -> Piece:
        """Have a piece, which is stored at the latest with `end`.

        Raises:
            StorageFailed: it could not be stored.
        """
        checksum = checksum_of(content)
        if known := self._earlier.get((checksum, len(content))):
            return known
        piece = Piece(f"{self._prefix}{self._number:06d}", len(self._content), len(content), checksum)
        self._earlier[checksum, len(content)] = piece
        self._content += content
        if len(self._content) >= _OBJECT_BYTES:
            self.end()
        return piece

    def end(self) -> None:
        """Store what is not yet.

        Raises:
            StorageFailed: it could not be.
        """
        if self._content:
            self._place.put(f"{self._prefix}{self._number:06d}", bytes(self._content))
            self._content, self._number = bytearray(), self._number + 1


def read_piece(place: SnapshotPlace, piece: Piece) -> bytes:
    """What a piece has.

    Raises:
        SnapshotDamaged: it is not there, or is damaged; the message names its object.
        StorageFailed: it could not be read.
    """
    content = place.get(piece.object, piece.start, piece.start + piece.bytes) if piece.bytes else b""
    if len(content) != piece.bytes or checksum_of(content) != piece.checksum:
        raise SnapshotDamaged(f"snapshots {place.url}: {piece.object} is damaged at byte {piece.start}")
    return content


def table_blocks(place: SnapshotPlace, table: SnapshotTable) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """The blocks of a table: the first row of each, and what its arrays have from there on.

    Raises:
        SnapshotDamaged: one is missing or damaged.
        StorageFailed: one could not be read.
    """
    kinds = [(np.dtype(dtype), tuple(shape)) for dtype, shape in table.arrays]
    for number, piece in enumerate(table.blocks):
        first, content, at, arrays = number * table.block_rows, read_piece(place, piece), 0, []
        rows = min(table.block_rows, table.rows - first)
        for dtype, shape in kinds:
            size = rows * dtype.itemsize * math.prod(shape)
            arrays.append(np.frombuffer(content[at : at + size], dtype).reshape(rows, *shape))
            at += size
        yield first, arrays


def pack_records(records: Iterable[LogRecord]) -> bytes:
    """Records of the log, one after the other."""
    packed = bytearray()
    for stream, number, part, index, payload in records:
        name = stream.encode()
        packed += _RECORD.pack(len(name), number, part, index, len(payload)) + name + payload
    return bytes(packed)


def unpack_records(packed: bytes) -> Iterator[LogRecord]:
    """The records that `pack_records` has packed."""
    at = 0
    while at < len(packed):
        length, number, part, index, size = _RECORD.unpack_from(packed, at)
        at += _RECORD.size
        name, payload = packed[at : at + length], packed[at + length : at + length + size]
        yield name.decode(), number, part, index, payload
        at += length + size


def pack_small(small: Mapping[str, bytes]) -> bytes:
    """Small records."""
    return json.dumps({name: value.decode("latin-1") for name, value in small.items()}).encode()


def unpack_small(packed: bytes) -> dict[str, bytes]:
    """The small records that `pack_small` has packed."""
    return {name: value.encode("latin-1") for name, value in json.loads(packed).items()}
