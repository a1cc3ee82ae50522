"""Between the wire's messages and NumPy arrays. What comes from outside is checked here."""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.core.mode import Mode
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import ID_TYPE, VALUE_TYPES, Shard, TableSpec
from deltasync.core.value_types import ValueType, own_type
from deltasync.v1 import publish_pb2, tables_pb2

# Just under 1,000,000 bytes: faster than 64 KiB or 4 MiB, and below the default limits of gRPC and brokers.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20

_RECORD = struct.Struct("<QQ")

_VALUE_TYPES: dict[Any, np.dtype[np.generic]] = {  # The stubs and the generated code type enums differently.
    tables_pb2.VALUE_TYPE_FP32: VALUE_TYPES[0],
    tables_pb2.VALUE_TYPE_FP16: VALUE_TYPES[1],
}
_SENT_AS: dict[Any, ValueType] = {
    tables_pb2.VALUE_TYPE_FP32: ValueType.FP32,
    tables_pb2.VALUE_TYPE_FP16: ValueType.FP16,
    tables_pb2.VALUE_TYPE_BF16: ValueType.BF16,
    tables_pb2.VALUE_TYPE_INT8: ValueType.INT8,
}
_MODES: dict[Any, Mode] = {
    tables_pb2.MODE_UNSPECIFIED: Mode.EMBEDDINGS,
    tables_pb2.MODE_EMBEDDINGS: Mode.EMBEDDINGS,
    tables_pb2.MODE_IDS: Mode.IDS,
}


def table_from_message(message: tables_pb2.Table) -> TableSpec:
    """The table a message describes.

    Raises:
        InvalidInput: a field is out of bounds, or the value type is unknown.
    """
    if message.value_type not in _VALUE_TYPES:
        raise InvalidInput(f"table {message.name!r}: value type {message.value_type}, expected fp32 or fp16")
    return TableSpec(message.name, message.rows, message.dim, _VALUE_TYPES[message.value_type])


def table_to_message(table: TableSpec) -> tables_pb2.Table:
    """The message that describes a table."""
    value_type = next(number for number, dtype in _VALUE_TYPES.items() if dtype == table.dtype)
    return tables_pb2.Table(name=table.name, rows=table.rows, dim=table.dim, value_type=value_type)


def value_type_from_message(number: int) -> ValueType | None:
    """The value type that a number of the wire stands for; None if it says nothing.

    Raises:
        InvalidInput: it stands for none.
    """
    if number == tables_pb2.VALUE_TYPE_UNSPECIFIED:
        return None
    if number not in _SENT_AS:
        raise InvalidInput(f"value type {number}: expected one of {', '.join(t.value for t in ValueType)}")
    return _SENT_AS[number]


def value_type_to_message(value_type: ValueType) -> Any:
    """The number that a value type has on the wire."""
    return next(number for number, known in _SENT_AS.items() if known is value_type)


def mode_from_message(number: int) -> Mode:
    """The mode that a number of the wire stands for.

    Raises:
        InvalidInput: it stands for none.
    """
    if number not in _MODES:
        raise InvalidInput(f"mode {number}: expected one of {', '.join(mode.value for mode in Mode)}")
    return _MODES[number]


def mode_to_message(mode: Mode) -> Any:
    """The number that a mode has on the wire."""
    return tables_pb2.MODE_IDS if mode is Mode.IDS else tables_pb2.MODE_EMBEDDINGS


def delivery_from_message(message: tables_pb2.Table, mode: Mode) -> Delivery:
    """What a subscriber is given of the table a message describes.

    Raises:
        InvalidInput: a field is out of bounds, or a value type is unknown.
    """
    table = table_from_message(message)
    return Delivery(table, value_type_from_message(message.sent_as) or own_type(table), mode)


def delivery_to_message(delivery: Delivery) -> tables_pb2.Table:
    """The message that describes what a subscriber is given of a table."""
    message = table_to_message(delivery.spec)
    message.sent_as = value_type_to_message(delivery.value_type)
    return message


def checksums_to_message(checksums: Mapping[int, int]) -> list[tables_pb2.Checksum]:
    """The messages that carry the checksums of tables, by slot."""
    return [tables_pb2.Checksum(slot=slot, sum=checksum) for slot, checksum in checksums.items()]


def shards_from_open(message: publish_pb2.PublishOpen, tables: list[TableSpec]) -> list[Shard]:
    """The shards a rank announces.

    Raises:
        InvalidInput: a shard names no table of the message or lies outside of it.
    """
    for number, shard in enumerate(message.shards):
        if shard.table >= len(tables):
            raise InvalidInput(f"shard {number} names table {shard.table}, the message has {len(tables)} tables")
    return [Shard(tables[s.table], s.row_offset, s.rows, s.col_offset, s.cols) for s in message.shards]


def shard_to_message(shard: Shard, tables: list[TableSpec]) -> publish_pb2.Shard:
    """The message that describes a shard."""
    return publish_pb2.Shard(
        table=tables.index(shard.table),
        row_offset=shard.row_offset,
        rows=shard.rows,
        col_offset=shard.col_offset,
        cols=shard.cols,
    )


def position_from_message(message: tables_pb2.Position) -> Position:
    """The position a message names."""
    return Position(message.history, message.version)


def position_to_message(position: Position) -> tables_pb2.Position:
    """The message that names a position."""
    return tables_pb2.Position(history=position.history, version=position.number)


def chunked(ids: Ids, values: Values) -> Iterator[tuple[Ids, Values]]:
    """Slices of `ids` ([n] int64) and `values` ([n, cols]) of at most `CHUNK_BYTES`, but at least one row."""
    step = max(1, CHUNK_BYTES // (ID_TYPE.itemsize + values.shape[1] * values.itemsize))
    for start in range(0, len(ids), step):
        yield ids[start : start + step], values[start : start + step]


def fill_rows(message: tables_pb2.Rows, slot: int, ids: Ids, values: Values) -> None:
    """Let a message carry `ids` ([n] int64) and their `values` ([n, cols]).

    The message is filled where it lies: assigning it to another one's field would copy it.
    """
    message.slot = slot
    message.ids = ids.astype(ID_TYPE, copy=False).tobytes()
    message.values = values.tobytes()


def decode_rows(message: tables_pb2.Rows, shards: list[Shard]) -> RowBatch:
    """The rows a message carries, as views of its bytes.

    Raises:
        InvalidInput: no such shard, or lengths that do not fit it.
    """
    return _rows_of(shards, message.slot, message.ids, message.values)


def pack_rows(slot: int, ids: Ids, values: Values) -> tuple[bytes | memoryview, ...]:
    """The log's record of some rows, in pieces: slot and number of rows, ids, values."""
    return _RECORD.pack(slot, len(ids)), ids.data, values.data


def unpack_rows(record: memoryview, shards: list[Shard]) -> RowBatch:
    """What `pack_rows` has packed, as views of the record.

    Raises:
        InvalidInput: the record does not fit the shards.
    """
    slot, count = _RECORD.unpack_from(record)
    ids_end = _RECORD.size + count * ID_TYPE.itemsize
    return _rows_of(shards, slot, record[_RECORD.size : ids_end], record[ids_end:])


def _rows_of(
    shards: list[Shard], slot: int, raw_ids: bytes | memoryview, raw_values: bytes | memoryview
) -> RowBatch:
    if slot >= len(shards):
        raise InvalidInput(f"rows for slot {slot}, but only {len(shards)} were announced")
    shard = shards[slot]
    count, rest = divmod(len(raw_ids), ID_TYPE.itemsize)
    if rest:
        raise InvalidInput(f"table {shard.table.name!r}: {len(raw_ids)} bytes of ids, expected a multiple of 8")
    expected = count * shard.cols * shard.table.dtype.itemsize
    if len(raw_values) != expected:
        raise InvalidInput(
            f"table {shard.table.name!r}: {len(raw_values)} bytes of values for {count} rows of {shard.cols} "
            f"{shard.table.dtype} values, expected {expected}: does the row's dimension or type differ?"
        )
    values = np.frombuffer(raw_values, shard.table.dtype).reshape(count, shard.cols)
    return RowBatch(shard, np.frombuffer(raw_ids, ID_TYPE), values)


def check_rows(batch: RowBatch) -> None:
    """Check what only bad or broken senders get wrong.

    Raises:
        InvalidInput: no rows, ids outside the shard or not strictly ascending, NaN or infinity.
    """
    shard, ids, values = batch.shard, batch.ids, batch.values
    name, first, last = shard.table.name, shard.row_offset, shard.row_offset + shard.rows
    if not len(ids):
        raise InvalidInput(f"table {name!r}: a chunk without rows")
    if np.any(ids[1:] <= ids[:-1]):
        raise InvalidInput(f"table {name!r}: ids must be strictly ascending inside a chunk")
    if ids[0] < first or ids[-1] >= last:
        bad = int(ids[0]) if ids[0] < first else int(ids[-1])
        raise InvalidInput(f"table {name!r}: row id {bad} is outside this rank's rows {first} to {last - 1}")
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise InvalidInput(
            f"table {name!r}: row {int(ids[row])} holds {values[row, column]} in column "
            f"{shard.col_offset + column}; NaN and infinity are not published"
        )
