"""Formats of the log's records: rows, seals and small records, each with a checksum."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from deltasync.base.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.table_form import spec_of_record, spec_record
from deltasync.core.tables import ID_TYPE, Shard, TableSpec
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import Buffer, LogStore
from deltasync.wire.row_messages import Columns, rows_pieces

# A record of rows: format, slot and layout, then the rows in the message in which they arrived.
_HEADER = struct.Struct("<BxxxIQ")
FORMAT = 1

# Names of records in messages.
_NAMES = {
    "cuts": "record {index} of rank {part} of version {number} of model {owner!r}",
    "seals": "seal of version {number} of model {owner!r}",
    "layouts": "layout {number} of model {owner!r}",
    "releases": "record {index} of table {part} of release {number} of consumer {owner!r}",
    "history": "line {number} in the history of consumer {owner!r}",
    "heads": "head of release {number} of consumer {owner!r}",
}


def name_of(stream: str, number: int, part: int = 0, index: int = 0) -> str:
    """The name of a stream's record, for messages."""
    kind, _, owner = stream.partition("/")
    name = _NAMES.get(kind, "record {number}/{part}/{index} of stream {kind}/{owner}")
    return name.format(kind=kind, owner=owner, number=number, part=part, index=index)


_ADDRESS = struct.Struct(">QII")  # Big-endian, because LMDB then sorts keys by address.
_CHECKSUM_BYTES = 8


def key_of(stream: str, number: int, part: int, index: int) -> bytes:
    """The key of a record."""
    return stream.encode() + b"\0" + _ADDRESS.pack(number, part, index)


def address_of(key: bytes) -> tuple[str, int, int, int]:
    """Stream, number, part and index from a record's key."""
    name, address = key[: -_ADDRESS.size], key[-_ADDRESS.size :]
    try:
        if name.endswith(b"\0"):
            return name[:-1].decode(), *_ADDRESS.unpack(address)
    except (UnicodeDecodeError, struct.error):
        pass
    raise damaged(f"record with the key {key!r}")


def with_checksum(key: bytes, *payload: Buffer) -> bytes:
    """The value of a record: a checksum of key and payload, then the payload."""
    return b"".join((_checksum(key, *payload), *payload))


def without_checksum(key: bytes, value: bytes, name: str, remedy: str = RESTORE) -> memoryview:
    """The payload from a value of `with_checksum`."""
    payload = memoryview(value)[_CHECKSUM_BYTES:]
    if value[:_CHECKSUM_BYTES] != _checksum(key, payload):
        raise damaged(name, remedy)
    return payload


def damaged(name: str, remedy: str = RESTORE) -> StorageFailed:
    """The error for a damaged record."""
    return StorageFailed(f"the log's {name} is damaged: {remedy}")


def _checksum(key: bytes, *payload: Buffer) -> bytes:
    checksum = xxhash.xxh3_64(key)
    for piece in payload:
        checksum.update(piece)
    return checksum.digest()


# Small records, and others without rows.


def pack_json(record: Mapping[str, Any]) -> bytes:
    """Encode a record without rows."""
    return json.dumps(record, separators=(",", ":")).encode()


def unpack_json(record: bytes | memoryview) -> Any:
    """Decode a record of `pack_json`."""
    return json.loads(bytes(record))


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn an error while reading a record inside the block into one that names the record."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise StorageFailed(f"the log's {name} is invalid ({error!r}): {RESTORE}") from error


# A layout has the tables of a run and the shards of one rank. Rows refer to it by a number, its hash.


def pack_layout(tables: Sequence[TableSpec], shards: Sequence[Shard]) -> bytes:
    """Encode a layout. A shard is: number of its table, first row, rows, first column, columns."""
    numbers = {table.name: number for number, table in enumerate(tables)}
    blocks = [[numbers[s.table.name], s.row_offset, s.rows, s.col_offset, s.cols] for s in shards]
    return pack_json({"tables": [spec_record(table) for table in tables], "shards": blocks})


def unpack_layout(record: memoryview) -> list[Shard]:
    """Decode the shards from a record of `pack_layout`."""
    layout = unpack_json(record)
    tables = [spec_of_record(each) for each in layout["tables"]]
    return [Shard(tables[table], *block) for table, *block in layout["shards"]]


def layout_number(record: bytes) -> int:
    """The number by which rows refer to a layout."""
    return xxhash.xxh3_64_intdigest(record)


# Rows.


def pack_rows(slot: int, rows: RowBatch, layout: int = 0) -> tuple[Buffer, ...]:
    """Encode rows in pieces: a header, then the `Rows` message without a copy.

    `slot` is the number of the rows' shard in the layout; without a layout, of their table in a view.
    """
    return _HEADER.pack(FORMAT, slot, layout), *rows_pieces(rows)


def unpack_rows(record: memoryview, shards_of: Callable[[int], Sequence[Shard]]) -> RowBatch:
    """Decode a record of `pack_rows` as views of it; `shards_of` returns a layout's shards by its number."""
    form, slot, layout = _HEADER.unpack_from(record)
    if form != FORMAT:
        raise StorageFailed(
            f"the log has rows of format {form}, this version reads {FORMAT}: update deltasync, or give it "
            "another --data-dir"
        )
    return Columns.read(record[_HEADER.size :]).rows_of(slot, shards_of(layout))


# Ids alone, for releases of views and for deletes.


def pack_ids(ids: Ids) -> bytes:
    """Encode the ids of some rows."""
    return np.asarray(ids, ID_TYPE).tobytes()


def unpack_ids(record: Buffer) -> Ids:
    """Decode a record of `pack_ids` as a view of it."""
    return np.frombuffer(record, ID_TYPE)


FORMAT_RECORD = "data-format"
_START_EMPTY = "start with an empty --data-dir, and let the trainer publish its models"
EARLIER_FORMAT = (
    f"an older version of deltasync wrote the log in a format that this version cannot read: {_START_EMPTY}"
)
# Streams that their owner reads completely at its start, with the kind of the small record that names the owner.
_READ_BY_OWNERS = {"seals": "model", "layouts": "model", "cuts": "model", "releases": "view", "heads": "view"}


def check_log(log: LogStore) -> None:
    """Check that this version can read a log, and write the format into a new one."""
    record = log.items(FORMAT_RECORD).get("")
    if record is None:
        if log.items("") or log.streams():
            raise StorageFailed(EARLIER_FORMAT)
        write_again(log).result()
        return
    check_format_record(record)
    small = log.items("")
    for stream in log.streams():
        kind, _, name = stream.partition("/")
        if f"{_READ_BY_OWNERS.get(kind)}/{name}" not in small:  # Without an owner, nothing else reads the stream.
            for _ in log.read(stream):
                pass


def check_format_record(record: bytes) -> None:
    """Check the record of a log's format."""
    with reading(f"record {FORMAT_RECORD}"):
        number = int(record)
    if number != FORMAT:
        raise StorageFailed(
            f"the log has format {number}, this version reads {FORMAT}: update deltasync, or give it another "
            "--data-dir"
        )


def check_not_missing(checkpoints: Path) -> None:
    """Check that there are no old checkpoints beside a new log."""
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        text = f"{checkpoints} has checkpoints, but the log beside it is missing"
        raise StorageFailed(f"{text}: make a data directory from it with deltasync restore; or {_START_EMPTY}")


def write_again(log: LogStore) -> Future[None]:
    """Write the record of the format again. The future ends once the log accepts writes, readable or not."""
    return log.put(FORMAT_RECORD, b"%d" % FORMAT)
