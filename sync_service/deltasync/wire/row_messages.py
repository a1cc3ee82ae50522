"""Rows in messages, cut into chunks. The values of a chunk are encoded once and not copied between hops.

Messages with rows are written here byte by byte, as protobuf has them: a generated class copies rows in and out
again. What a publisher sends is read here too, as views of the bytes that were received. The service appends these
bytes to its log and sends them to replicas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import Message

from deltasync.core.rows import RowBatch
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2

# Of ids and values. Just under 1,000,000 bytes: faster than 64 KiB or 4 MiB, and below the default limit of gRPC.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20
# Tables of a whole part that are read at once: they take a millisecond of the event loop.
_TABLES_AT_ONCE = 64

Pieces: TypeAlias = "list[bytes | memoryview]"

_NUMBER, _BYTES = 0, 2  # How a field's value is written.


def chunk_rows(row_bytes: int) -> int:
    """The number of rows in a chunk: at most `CHUNK_BYTES` of them, or one row."""
    return max(1, CHUNK_BYTES // row_bytes)


def chunked(rows: RowBatch) -> Iterator[RowBatch]:
    """Split rows into chunks, each of at most `CHUNK_BYTES` or of one row."""
    return rows.blocks(chunk_rows(rows.shard.row_bytes))


def fits_message(size: int) -> bool:
    """Whether ids and values of this size, of any tables, go in one message."""
    return size <= CHUNK_BYTES


# Writing.


def part_chunk(step: int, slot: int, rows: RowBatch) -> bytes:
    """The `PublishRequest` that carries some rows of the shard that has the number `slot`."""
    pieces = [_field(_STEP), _varint(step), *_message(_PART_ROWS, _table_rows(slot, rows))]
    return b"".join(_message(_PART_CHUNK, pieces))


def whole_part(rows: Iterable[tuple[int, RowBatch]], close: publish_pb2.PartClose) -> bytes:
    """The `PublishRequest` that carries a whole part: rows with the numbers of their shards, and its close."""
    pieces = [piece for slot, batch in rows for piece in _message(_WHOLE_PART_ROWS, _table_rows(slot, batch))]
    pieces += _message(_WHOLE_PART_CLOSE, [close.SerializeToString()])
    return b"".join(_message(_WHOLE_PART, pieces))


def release_chunk(slot: int, rows: RowBatch) -> bytes:
    """The `SubscribeResponse` that carries some rows of the table with the number `slot`. It ends with them."""
    return b"".join(_message(_RELEASE_CHUNK, _message(_RELEASE_ROWS, _table_rows(slot, rows))))


def whole_release(chunks: Iterable[tuple[int, RowBatch]], end: subscribe_pb2.ReleaseEnd) -> bytes:
    """The `SubscribeResponse` that carries a whole release: rows with the numbers of their tables, and its end."""
    pieces = [piece for slot, rows in chunks for piece in _message(_RELEASE_ROWS, _table_rows(slot, rows))]
    pieces += _message(_WHOLE_RELEASE_END, [end.SerializeToString()])
    return b"".join(_message(_WHOLE_RELEASE, pieces))


def serialized(message: Message | bytes) -> bytes:
    """The bytes of a message, which may be written already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def rows_pieces(rows: RowBatch) -> Pieces:
    """The `Rows` message of some rows, in pieces: the bytes in which they came, if they came in some."""
    if rows.encoded is not None:
        return [rows.encoded]
    pieces = _message(_IDS, [_bytes_of(rows.ids.astype(ID_TYPE, copy=False))])
    if rows.deleted:
        return [*pieces, _field(_DELETED), _varint(1)]
    if rows.digests is not None:
        pieces += _message(_DIGESTS, [_bytes_of(rows.digests.astype(DIGEST_TYPE, copy=False))])
    return [*pieces, *_message(_VALUES, [_bytes_of(rows.values)])]


def encoded(rows: RowBatch) -> RowBatch:
    """The same rows as views of their `Rows` message, which is written unless they came in one."""
    return rows if rows.encoded is not None else _views_of(memoryview(b"".join(rows_pieces(rows))), rows)


def at_end_of(message: bytes, rows: RowBatch) -> RowBatch:
    """The same rows as views of a message that ends with them, so that other memory which they take can go."""
    return _views_of(memoryview(message)[len(message) - sum(map(len, rows_pieces(rows))) :], rows)


def _views_of(message: memoryview, rows: RowBatch) -> RowBatch:
    """The same rows as views of their `Rows` message."""
    columns = Columns.read(message)
    return replace(
        rows,
        ids=np.frombuffer(columns.ids, ID_TYPE),
        values=rows.values if rows.deleted else _array_of(columns.values, rows.values),
        digests=None if rows.digests is None else _array_of(columns.digests, rows.digests),
        encoded=message,
    )


def _array_of(raw: memoryview, like: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return np.frombuffer(raw, like.dtype).reshape(like.shape)


def _table_rows(slot: int, rows: RowBatch) -> Pieces:
    return [_field(_SLOT), _varint(slot), *_message(_ROWS, rows_pieces(rows))]


def _bytes_of(array: "np.ndarray[Any, np.dtype[Any]]") -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _message(tag: int, pieces: Pieces) -> Pieces:
    """A field whose value is bytes, or another message, that come in pieces."""
    return [_field(tag), _varint(sum(map(len, pieces))), *pieces]


def _field(tag: int) -> bytes:
    return bytes((tag,))


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


# Reading.


class NotAsWritten(ValueError):
    """Bytes are not what this module would have written. They may be protobuf all the same."""


class _Fields:
    """Reads the fields of a message in the order of their numbers, each once at most."""

    def __init__(self, raw: memoryview) -> None:
        self._raw, self._at = raw, 0

    def number(self, tag: int) -> int:
        """The number of this field; 0 if another field comes next."""
        return self._varint() if self._comes(tag) else 0

    def bytes(self, tag: int) -> memoryview | None:
        """The bytes, or the message, of this field; None if another field comes next."""
        if not self._comes(tag):
            return None
        size = self._varint()
        found = self._raw[self._at : self._at + size]
        if len(found) < size:
            raise NotAsWritten(f"a field of {size} bytes, but only {len(found)} are left")
        self._at += size
        return found

    def end(self) -> None:
        """Check that there is no other field."""
        if self._at < len(self._raw):
            raise NotAsWritten(f"{len(self._raw) - self._at} bytes that are none of the fields")

    def _comes(self, tag: int) -> bool:
        if self._at == len(self._raw) or self._raw[self._at] != tag:
            return False
        self._at += 1
        return True

    def _varint(self) -> int:
        number = shift = 0
        for byte in self._raw[self._at : self._at + 10]:
            self._at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if number >> 64 or (shift and not byte):
                    break  # Other readers may refuse a number that is longer than it need be.
                return number
            shift += 7
        raise NotAsWritten("a number that is cut off, or longer than it need be")


@dataclass(frozen=True)
class Columns:
    """A `Rows` message, taken apart: all of it, and the values of its fields, as views of it."""

    message: memoryview
    ids: memoryview
    digests: memoryview
    values: memoryview
    deleted: bool

    @classmethod
    def read(cls, message: memoryview) -> "Columns":
        """Take a message apart.

        Raises:
            NotAsWritten: `rows_pieces` would not have written it.
        """
        fields, none = _Fields(message), message[:0]
        ids, digests, values = (fields.bytes(tag) or none for tag in (_IDS, _DIGESTS, _VALUES))
        deleted = fields.number(_DELETED)
        fields.end()
        return cls(message, ids, digests, values, bool(deleted))

    @property
    def size(self) -> int:
        """Bytes of ids and values."""
        return len(self.ids) + len(self.values)

    def rows_of(self, slot: int, shards: Sequence[Shard]) -> RowBatch:
        """The rows of the shard that has the number `slot`, as views of the message.

        Raises:
            InvalidInput: no such shard, or lengths that do not fit it.
        """
        rows = RowBatch.from_bytes(
            shards, slot, self.ids, self.values, deleted=self.deleted, raw_digests=self.digests
        )
        # Digests of rows that are no more mean nothing, and nobody has counted them: they go no further.
        return rows if self.deleted and self.digests else replace(rows, encoded=self.message)


@dataclass(frozen=True)
class ReceivedRows:
    """Rows of a part, or all of it, as they were received.

    Attributes:
        step: the optimizer step of the cut.
        rows: the numbers of shards, and rows of these; to be read once. Of many, each is read as it is asked for.
        close: of a whole part, its end; None where others of the part follow.
    """

    step: int
    rows: Iterable[tuple[int, Columns]]
    close: publish_pb2.PartClose | None = None


PublishRequest: TypeAlias = publish_pb2.PublishRequest | ReceivedRows


def read_request(raw: bytes) -> PublishRequest:
    """A request of a publisher; one that carries rows has them as views of its bytes.

    A message with rows that is written in another way than here, with unknown fields or a field twice, is written
    again, so that no unchecked byte reaches the log or a replica.

    Raises:
        DecodeError: it is no `PublishRequest`.
    """
    try:
        return _received(raw)
    except NotAsWritten:
        message = publish_pb2.PublishRequest.FromString(raw)
    if message.WhichOneof("message") not in ("chunk", "part"):
        return message
    message.DiscardUnknownFields()
    part = message.part
    if len(part.rows) > _TABLES_AT_ONCE:
        each = (_of_table(memoryview(rows.SerializeToString())) for rows in part.rows)
        return ReceivedRows(part.close.step, each, part.close)
    return _received(message.SerializeToString())


def _received(raw: bytes) -> ReceivedRows:
    request = _Fields(memoryview(raw))
    chunk, part = request.bytes(_PART_CHUNK), request.bytes(_WHOLE_PART)
    request.end()
    if chunk is not None and part is None:
        fields = _Fields(chunk)
        step, rows = fields.number(_STEP), fields.bytes(_PART_ROWS)
        fields.end()
        return ReceivedRows(step, [_of_table(chunk[:0] if rows is None else rows)])
    if part is not None and chunk is None:
        fields, several = _Fields(part), list[tuple[int, Columns]]()
        while (rows := fields.bytes(_WHOLE_PART_ROWS)) is not None:
            if len(several) == _TABLES_AT_ONCE:
                raise NotAsWritten("more tables than are read at once")
            several.append(_of_table(rows))
        close = publish_pb2.PartClose.FromString(bytes(fields.bytes(_WHOLE_PART_CLOSE) or b""))
        fields.end()
        return ReceivedRows(close.step, several, close)
    raise NotAsWritten("a message without rows")


def _of_table(raw: memoryview) -> tuple[int, Columns]:
    fields = _Fields(raw)
    slot, rows = fields.number(_SLOT), fields.bytes(_ROWS)
    fields.end()
    if slot >> 32:
        raise NotAsWritten("a slot of more than 32 bits")
    return slot, Columns.read(raw[:0] if rows is None else rows)


def decode_rows(message: tables_pb2.TableRows, shards: Sequence[Shard]) -> RowBatch:
    """The rows that a message of a generated class carries, as views of its bytes.

    Raises:
        InvalidInput: no such shard, or lengths that do not fit it.
    """
    rows = message.rows
    return RowBatch.from_bytes(
        shards, message.slot, rows.ids, rows.values, deleted=rows.deleted, raw_digests=rows.digests
    )


def _tag(message: type[Message], field: str, kind: int = _BYTES) -> int:
    """The byte before a field's value. Fields have numbers below 16."""
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | kind


_IDS, _DIGESTS = _tag(tables_pb2.Rows, "ids"), _tag(tables_pb2.Rows, "digests")
_VALUES, _DELETED = _tag(tables_pb2.Rows, "values"), _tag(tables_pb2.Rows, "deleted", _NUMBER)
_SLOT, _ROWS = _tag(tables_pb2.TableRows, "slot", _NUMBER), _tag(tables_pb2.TableRows, "rows")
_STEP, _PART_ROWS = _tag(publish_pb2.PartChunk, "step", _NUMBER), _tag(publish_pb2.PartChunk, "rows")
_PART_CHUNK = _tag(publish_pb2.PublishRequest, "chunk")
_WHOLE_PART_ROWS, _WHOLE_PART_CLOSE = _tag(publish_pb2.WholePart, "rows"), _tag(publish_pb2.WholePart, "close")
_WHOLE_PART = _tag(publish_pb2.PublishRequest, "part")
_RELEASE_ROWS = _tag(subscribe_pb2.ReleaseChunk, "rows")  # The number that it has in a `WholeRelease`, too.
_RELEASE_CHUNK = _tag(subscribe_pb2.SubscribeResponse, "chunk")
_WHOLE_RELEASE_END = _tag(subscribe_pb2.WholeRelease, "end")
_WHOLE_RELEASE = _tag(subscribe_pb2.SubscribeResponse, "release")
