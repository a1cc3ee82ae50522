"""Write and read messages with rows, in chunks, without copying the rows.

The generated protobuf classes copy rows in and out. This module writes the protobuf bytes itself, and reads rows
as views of the received bytes. The service appends a publisher's bytes to its log and sends them to replicas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2

# Bytes of a chunk's ids, digests and values. Faster than 64 KiB and 4 MiB, and below gRPC's own limit.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20

Pieces: TypeAlias = "list[bytes | memoryview]"
M = TypeVar("M", publish_pb2.PublishRequest, subscribe_pb2.SubscribeResponse)
End = TypeVar("End", publish_pb2.PartClose, subscribe_pb2.ReleaseEnd)

_NUMBER, _BYTES = 0, 2  # Protobuf's wire types.


def chunk_rows(row_bytes: int) -> int:
    """The number of rows in a chunk of at most `CHUNK_BYTES`, at least one.

    `row_bytes` is the size of a row's id and values; a digest is added to each row.
    """
    return max(1, CHUNK_BYTES // (row_bytes + DIGEST_TYPE.itemsize))


def chunked(rows: RowBatch) -> Iterator[RowBatch]:
    """Split rows into chunks of at most `CHUNK_BYTES`, or of one row."""
    return rows.blocks(chunk_rows(rows.shard.row_bytes))


def fits_message(size: int) -> bool:
    """Whether ids, digests and values of this total size fit into one message."""
    return size <= CHUNK_BYTES


# Writing.


def part_chunk(step: int, slot: int, rows: RowBatch) -> bytes:
    """Write a `PublishRequest` with rows of the shard `slot`."""
    pieces = [_field(_STEP), _varint(step), *_message(_ROWS, _table_rows(slot, rows))]
    return b"".join(_message(_CHUNK, pieces))


def release_chunk(slot: int, rows: RowBatch) -> bytes:
    """Write a `SubscribeResponse` with rows of the table `slot`, which are its last bytes.

    A chunk that a publisher sent for the same slot is already one: the result is its message, without a copy.
    """
    if rows.encoded is not None and (published := _published(slot, rows.encoded)):
        return published
    return b"".join(_message(_CHUNK, _message(_ROWS, _table_rows(slot, rows))))


def _published(slot: int, encoded: memoryview) -> bytes | None:
    """The publisher's message that consists of these rows of the table `slot`; None if there is none."""
    message = encoded.obj
    if not isinstance(message, bytes) or not message.startswith(bytes((_CHUNK,))):
        return None
    try:
        ((sent_slot, columns),) = _received(message, publish_pb2.PartClose).rows
    except NotAsWritten:
        return None
    return message if sent_slot == slot and len(columns.message) == len(encoded) else None


def whole_message(end: Pieces, rows: Pieces) -> bytes:
    """Write a `PublishRequest` or `SubscribeResponse` with a whole part or release: its serialized end, and its
    rows. Readers merge the pieces of the end, because protobuf merges concatenated messages.
    """
    return b"".join(_message(_WHOLE, [*_message(_END, end), *rows]))


def table_pieces(rows: Iterable[tuple[int, RowBatch]]) -> Pieces:
    """The rows of a whole part or release, by slot, in pieces."""
    return [piece for slot, batch in rows for piece in _message(_ROWS, _table_rows(slot, batch))]


def release_end(end: Pieces) -> bytes:
    """Write a `SubscribeResponse` with the end of a release; `end` as in `whole_message`."""
    return b"".join(_message(_RELEASE_END, end))


def serialized(message: Message | bytes) -> bytes:
    """Serialize a message, unless it consists of bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def rows_pieces(rows: RowBatch) -> Pieces:
    """The `Rows` message of rows, in pieces. Rows that were received keep their bytes."""
    if rows.encoded is not None:
        return [rows.encoded]
    if rows.deleted:
        return [*_message(_IDS, [_bytes_of(rows.ids.astype(ID_TYPE, copy=False))]), _field(_DELETED), _varint(1)]
    return [*before_values(rows.ids, rows.digests, rows.values.nbytes), _bytes_of(rows.values)]


def before_values(ids: Ids, digests: RowDigests | None, value_bytes: int) -> Pieces:
    """The `Rows` message of existing rows, without the values, which are its last `value_bytes`."""
    pieces = _message(_IDS, [_bytes_of(ids.astype(ID_TYPE, copy=False))])
    if digests is not None:
        pieces += _message(_DIGESTS, [_bytes_of(digests.astype(DIGEST_TYPE, copy=False))])
    return [*pieces, _field(_VALUES), _varint(value_bytes)]


def encoded(rows: RowBatch) -> RowBatch:
    """The rows as views of their `Rows` message. Writes the message unless the rows were received in one."""
    return rows if rows.encoded is not None else _views_of(memoryview(b"".join(rows_pieces(rows))), rows)


def at_end_of(message: bytes, rows: RowBatch) -> RowBatch:
    """The rows as views of a message that ends with them. This frees their other memory."""
    if rows.encoded is not None and rows.encoded.obj is message:
        return rows
    return _views_of(memoryview(message)[len(message) - sum(map(len, rows_pieces(rows))) :], rows)


def _views_of(message: memoryview, rows: RowBatch) -> RowBatch:
    """The rows as views of their `Rows` message."""
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
    return [_field(_SLOT), _varint(slot), *_message(_TABLE_ROWS, rows_pieces(rows))]


def _bytes_of(array: "np.ndarray[Any, np.dtype[Any]]") -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _message(tag: int, pieces: Pieces) -> Pieces:
    """A field with bytes, or another message, in pieces."""
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
    """The bytes are not in this module's own form. They may still be valid protobuf."""


class _Fields:
    """Reads the fields of a message in ascending order, each at most once."""

    def __init__(self, raw: memoryview) -> None:
        self._raw, self._at = raw, 0

    def number(self, tag: int) -> int:
        """The number in this field; 0 if the next field is another one."""
        return self._varint() if self._comes(tag) else 0

    def bytes(self, tag: int) -> memoryview | None:
        """The bytes or the message in this field; None if the next field is another one."""
        if not self._comes(tag):
            return None
        size = self._varint()
        value = self._raw[self._at : self._at + size]
        if len(value) < size:
            raise NotAsWritten(f"a field of {size} bytes, but only {len(value)} are left")
        self._at += size
        return value

    @property
    def rest(self) -> memoryview:
        """The unread bytes."""
        return self._raw[self._at :]

    def end(self) -> None:
        """Check that all fields were read."""
        if self._at < len(self._raw):
            raise NotAsWritten(f"{len(self._raw) - self._at} bytes of other fields")

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
                    break  # Other readers may refuse a number that is not in its shortest form.
                return number
            shift += 7
        raise NotAsWritten("a number that is cut off, or not in its shortest form")


@dataclass(frozen=True)
class Columns:
    """A `Rows` message and its fields, as views of the bytes."""

    message: memoryview
    ids: memoryview
    digests: memoryview
    values: memoryview
    deleted: bool

    @classmethod
    def read(cls, message: memoryview) -> "Columns":
        """Read a message."""
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
        """The rows of the shard `slot`, as views of the message. Deletes have ids only; digests are optional."""
        if slot >= len(shards):
            raise InvalidInput(f"rows for slot {slot}, but only {len(shards)} were announced")
        shard = shards[slot]
        table, dtype = f"table {shard.table.name!r}", shard.table.dtype
        count, rest = divmod(len(self.ids), ID_TYPE.itemsize)
        if rest:
            raise InvalidInput(f"{table}: {len(self.ids)} bytes of ids, expected a multiple of 8")
        expected = 0 if self.deleted else count * shard.cols * dtype.itemsize
        if len(self.values) != expected:
            raise InvalidInput(
                f"{table}: {len(self.values)} bytes of values for {counted(count, 'row')} of {shard.cols} {dtype} "
                f"values, expected {expected}: does the row's dimension or type differ?"
            )
        if self.digests and len(self.digests) != count * DIGEST_TYPE.itemsize:
            raise InvalidInput(
                f"{table}: {len(self.digests)} bytes of digests for {counted(count, 'row')}, not 8 each"
            )
        ids = np.frombuffer(self.ids, ID_TYPE)
        if self.deleted:
            # Deleted rows need no digests, and digests do not count as bytes of the row: do not pass them on.
            return RowBatch.deletes(shard, ids, encoded=None if self.digests else self.message)
        values = np.frombuffer(self.values, dtype).reshape(count, shard.cols)
        digests = np.frombuffer(self.digests, DIGEST_TYPE) if self.digests else None
        return RowBatch(shard, ids, values, digests=digests, encoded=self.message)


@dataclass(frozen=True)
class ReceivedRows(Generic[End]):
    """Received rows: a chunk, or a whole part or release.

    Attributes:
        step: the optimizer step of the cut.
        rows: slots and their rows. The iterator reads each message only when it reaches it.
        end: the end of a whole part or release; None for a chunk.
    """

    step: int
    rows: Iterator[tuple[int, Columns]]
    end: End | None = None


PublishRequest: TypeAlias = publish_pb2.PublishRequest | ReceivedRows[publish_pb2.PartClose]
SubscribeResponse: TypeAlias = subscribe_pb2.SubscribeResponse | ReceivedRows[subscribe_pb2.ReleaseEnd]


# Each side of a stream sends this many messages within the time in which the other expects one.
MESSAGES_IN_TIME = 3


def is_alive(message: Any) -> bool:
    """Whether a message of a stream is an `Alive`."""
    return not isinstance(message, ReceivedRows) and bool(message.HasField("alive"))


def read_request(raw: bytes) -> PublishRequest:
    """Read a publisher's request, with rows as views of its bytes.

    Rows in another form, for example with unknown fields or a field twice, are written again, so no unchecked byte
    reaches the log or a replica.
    """
    return _read(raw, publish_pb2.PublishRequest, publish_pb2.PartClose)


def read_response(raw: bytes) -> SubscribeResponse:
    """Read a message to a replica, with rows as views of its bytes."""
    return _read(raw, subscribe_pb2.SubscribeResponse, subscribe_pb2.ReleaseEnd)


def _read(raw: bytes, kind: type[M], end: type[End]) -> M | ReceivedRows[End]:
    try:
        return _received(raw, end)
    except NotAsWritten:
        message = kind.FromString(raw)
    if message.WhichOneof("message") not in ("chunk", "part", "release"):
        return message
    message.DiscardUnknownFields()
    return _received(message.SerializeToString(), end)


def _received(raw: bytes, end: type[End]) -> ReceivedRows[End]:
    message = _Fields(memoryview(raw))
    chunk, whole = message.bytes(_CHUNK), message.bytes(_WHOLE)
    message.end()
    if chunk is not None and whole is None:
        fields = _Fields(chunk)
        step, table = fields.number(_STEP), _of_table(fields.bytes(_ROWS) or chunk[:0])
        fields.end()
        return ReceivedRows(step, iter((table,)))
    if whole is not None and chunk is None:
        fields = _Fields(whole)
        ends = end.FromString(bytes(fields.bytes(_END) or b""))
        return ReceivedRows(ends.step, _tables(fields), ends)
    raise NotAsWritten("a message without rows")


def _tables(fields: _Fields) -> Iterator[tuple[int, Columns]]:
    """Read the tables of a whole part or release one by one."""
    while rest := fields.rest:
        try:
            table = _of_table(fields.bytes(_ROWS))
        except NotAsWritten:
            yield from _tables_written_otherwise(bytes(rest))
            return
        yield table


def _tables_written_otherwise(raw: bytes) -> Iterator[tuple[int, Columns]]:
    try:
        message = publish_pb2.WholePart.FromString(raw)  # A whole release has the same fields.
    except DecodeError as error:
        raise InvalidInput(f"{len(raw)} bytes that are not tables of a whole part or release") from error
    if message.HasField("close"):
        raise InvalidInput("a whole part or release whose end comes after rows: send the end first, and once")
    message.DiscardUnknownFields()
    for rows in message.rows:
        yield _of_table(memoryview(rows.SerializeToString()))


def _of_table(raw: memoryview | None) -> tuple[int, Columns]:
    if raw is None:
        raise NotAsWritten("another field than rows")
    fields = _Fields(raw)
    slot, rows = fields.number(_SLOT), fields.bytes(_TABLE_ROWS)
    fields.end()
    if slot >> 32:
        raise NotAsWritten("a slot of more than 32 bits")
    return slot, Columns.read(rows or raw[:0])


def _tag(message: type[Message], field: str, kind: int = _BYTES) -> int:
    """The byte before a field's value, for field numbers below 16."""
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | kind


_IDS, _DIGESTS = _tag(tables_pb2.Rows, "ids"), _tag(tables_pb2.Rows, "digests")
_VALUES, _DELETED = _tag(tables_pb2.Rows, "values"), _tag(tables_pb2.Rows, "deleted", _NUMBER)
_SLOT, _TABLE_ROWS = _tag(tables_pb2.TableRows, "slot", _NUMBER), _tag(tables_pb2.TableRows, "rows")
# The fields for publishers have the same numbers in the messages to replicas.
_CHUNK, _WHOLE = _tag(publish_pb2.PublishRequest, "chunk"), _tag(publish_pb2.PublishRequest, "part")
_STEP, _ROWS = _tag(publish_pb2.PartChunk, "step", _NUMBER), _tag(publish_pb2.PartChunk, "rows")
_END, _RELEASE_END = _tag(publish_pb2.WholePart, "close"), _tag(subscribe_pb2.SubscribeResponse, "release_end")
