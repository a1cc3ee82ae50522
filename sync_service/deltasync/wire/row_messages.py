"""Rows in messages, cut into chunks.

Messages with rows are written here byte by byte, as protobuf has them, so that rows are copied once: a generated
class copies them in and out again. They are read by generated classes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import Message

from deltasync.core.rows import RowBatch
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2

# Just under 1,000,000 bytes: faster than 64 KiB or 4 MiB, and below the default limits of gRPC and brokers.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20

_Pieces: TypeAlias = "list[bytes | memoryview]"

_NUMBER, _BYTES = 0, 2  # How a field's value is written.


def chunk_rows(row_bytes: int) -> int:
    """How many rows are sent together: `CHUNK_BYTES` of them at most, or one."""
    return max(1, CHUNK_BYTES // row_bytes)


def chunked(rows: RowBatch) -> Iterator[RowBatch]:
    """Some rows in pieces, each of at most `CHUNK_BYTES` or of one row."""
    return rows.blocks(chunk_rows(rows.shard.row_bytes))


def fits_message(size: int) -> bool:
    """Whether so many bytes of ids and values, of whatever tables, are sent in one message."""
    return size <= CHUNK_BYTES


def part_chunk(step: int, slot: int, rows: RowBatch) -> bytes:
    """The `PublishRequest` that carries some rows of the shard that has the number `slot`."""
    pieces = [_STEP, _varint(step), *_field(_PART_ROWS, _rows(slot, rows))]
    return b"".join(_field(_PART_CHUNK, pieces))


def whole_part(rows: Iterable[tuple[int, RowBatch]], close: publish_pb2.PartClose) -> bytes:
    """The `PublishRequest` that carries a whole part: rows with the numbers of their shards, and its close."""
    pieces = [piece for slot, batch in rows for piece in _field(_WHOLE_PART_ROWS, _rows(slot, batch))]
    pieces += _field(_WHOLE_PART_CLOSE, [close.SerializeToString()])
    return b"".join(_field(_WHOLE_PART, pieces))


def release_chunk(slot: int, rows: RowBatch) -> bytes:
    """The `SubscribeResponse` that carries some rows, without digests, of the table that has the number `slot`."""
    pieces = _rows(slot, replace(rows, digests=None))
    return b"".join(_field(_RELEASE_CHUNK, _field(_RELEASE_ROWS, pieces)))


def whole_release(chunks: Iterable[bytes], end: subscribe_pb2.ReleaseEnd) -> bytes:
    """The `SubscribeResponse` that carries a whole release: what `release_chunk` has written, and its end."""
    pieces: _Pieces = [memoryview(chunk)[_head_bytes(chunk) :] for chunk in chunks]
    pieces += _field(_WHOLE_RELEASE_END, [end.SerializeToString()])
    return b"".join(_field(_WHOLE_RELEASE, pieces))


def _head_bytes(chunk: bytes) -> int:
    """How long a tag and a length are, which come before the rows: all bytes of a length but the last are high."""
    last = len(_RELEASE_CHUNK)
    while chunk[last] & 0x80:
        last += 1
    return last + 1


def rows_in_chunk(message: bytes, rows: RowBatch) -> RowBatch:
    """The rows that `release_chunk` has written into a message, as views of it; of those deleted, as they were."""
    if rows.deleted:
        return rows
    end = len(message) - rows.values.nbytes
    values = np.frombuffer(message, rows.values.dtype, offset=end).reshape(rows.values.shape)
    end -= len(_VALUES) + len(_varint(rows.values.nbytes))
    ids = np.frombuffer(message, ID_TYPE, len(rows), end - rows.ids.nbytes)
    return replace(rows, ids=ids, values=values, digests=None)


def serialized(message: Message | bytes) -> bytes:
    """A message as it is sent; one that is written already is sent as it is."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def decode_rows(message: tables_pb2.Rows, shards: list[Shard]) -> RowBatch:
    """The rows a message carries, as views of its bytes.

    Raises:
        InvalidInput: no such shard, or lengths that do not fit it.
    """
    return RowBatch.from_bytes(
        shards,
        message.slot,
        message.ids,
        message.values,
        deleted=message.deleted,
        raw_digests=message.digests,
    )


def _rows(slot: int, rows: RowBatch) -> _Pieces:
    pieces: _Pieces = [_SLOT, _varint(slot), *_field(_IDS, [_bytes_of(rows.ids.astype(ID_TYPE, copy=False))])]
    if rows.deleted:
        return [*pieces, _DELETED, _varint(1)]
    if rows.digests is not None:
        pieces += _field(_DIGESTS, [_bytes_of(rows.digests.astype(DIGEST_TYPE, copy=False))])
    return [*pieces, *_field(_VALUES, [_bytes_of(rows.values)])]  # Last: see `rows_in_chunk`.


def _bytes_of(array: "np.ndarray[Any, np.dtype[Any]]") -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _field(tag: bytes, pieces: _Pieces) -> _Pieces:
    """A field whose value is bytes, or another message, that come in pieces."""
    return [tag, _varint(sum(map(len, pieces))), *pieces]


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _tag(message: type[Message], field: str, kind: int = _BYTES) -> bytes:
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


_SLOT, _IDS = _tag(tables_pb2.Rows, "slot", _NUMBER), _tag(tables_pb2.Rows, "ids")
_VALUES, _DELETED = _tag(tables_pb2.Rows, "values"), _tag(tables_pb2.Rows, "deleted", _NUMBER)
_DIGESTS = _tag(tables_pb2.Rows, "digests")
_STEP, _PART_ROWS = _tag(publish_pb2.PartChunk, "step", _NUMBER), _tag(publish_pb2.PartChunk, "rows")
_PART_CHUNK = _tag(publish_pb2.PublishRequest, "chunk")
_RELEASE_ROWS = _tag(subscribe_pb2.ReleaseChunk, "rows")
_RELEASE_CHUNK = _tag(subscribe_pb2.SubscribeResponse, "chunk")
_WHOLE_PART_ROWS, _WHOLE_PART_CLOSE = _tag(publish_pb2.WholePart, "rows"), _tag(publish_pb2.WholePart, "close")
_WHOLE_PART = _tag(publish_pb2.PublishRequest, "part")
_WHOLE_RELEASE_END = _tag(subscribe_pb2.WholeRelease, "end")
_WHOLE_RELEASE = _tag(subscribe_pb2.SubscribeResponse, "release")
