"""How records of the log are written: rows, seals and small records, each with a checksum."""

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
from deltasync.core.delivery import spec_of_record, spec_record
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard, TableSpec
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import Buffer, LogStore

# Records of rows: format, kind, columns, slot, number of rows, layout; then the columns, one after the other.
_HEADER = struct.Struct("<BBHIQQ")
FORMAT = 1
_ROWS = 1  # The one kind there is.
VALUES = 1  # A column beside the ids.
DELETED = 2  # Instead of values.
DIGESTS = 4  # After the ids.
_COLUMNS = VALUES | DELETED | DIGESTS

# What records of streams are called in messages.
_NAMES = {
    "cuts": "record {index} of rank {part} of version {number} of model {owner!r}",
    "seals": "seal of version {number} of model {owner!r}",
    "layouts": "layout {number} of model {owner!r}",
    "releases": "record {index} of table {part} of release {number} of consumer {owner!r}",
    "heads": "head of release {number} of consumer {owner!r}",
}


def name_of(stream: str, number: int, part: int = 0, index: int = 0) -> str:
    """What a record of a stream is called in messages."""
    kind, _, owner = stream.partition("/")
    name = _NAMES.get(kind, "record {number}/{part}/{index} of stream {kind}/{owner}")
    return name.format(kind=kind, owner=owner, number=number, part=part, index=index)


# Small records, and others that are not rows.


def pack_json(record: Mapping[str, Any]) -> bytes:
    """A record that is not rows."""
    return json.dumps(record, separators=(",", ":")).encode()


def unpack_json(record: bytes | memoryview) -> Any:
    """What `pack_json` has packed.

    Raises:
        ValueError: it is something else.
    """
    return json.loads(bytes(record))


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns errors of what is read inside, which is called `name`, into one that names it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise StorageFailed(f"the log's {name} cannot be understood ({error!r}): {RESTORE}") from error


def seal_record(seal: Seal) -> dict[str, Any]:
    """The record of a seal."""
    record = {
        "version": seal.version,
        "step": seal.step,
        "run": seal.run,
        "run_started_unix_ns": seal.run_started_unix_ns,
        "world_size": seal.world_size,
        "rows": seal.rows,
        "bytes": seal.bytes,
        "log_bytes": seal.log_bytes,
        "step_end_unix_ns": seal.step_end_unix_ns,
        "sealed_unix_ns": seal.sealed_unix_ns,
        "resync": seal.resync,
        "whole": list(seal.whole),
        "checksum": seal.checksum,
    }
    return record | event_time_record(seal.event_time_unix_ns)


def seal_of_record(record: Mapping[str, Any]) -> Seal:
    """The seal that a record describes."""
    return Seal(
        version=record["version"],
        step=record["step"],
        run=record["run"],
        run_started_unix_ns=record["run_started_unix_ns"],
        world_size=record["world_size"],
        rows=record["rows"],
        bytes=record["bytes"],
        log_bytes=record["log_bytes"],
        step_end_unix_ns=record["step_end_unix_ns"],
        sealed_unix_ns=record["sealed_unix_ns"],
        resync=record["resync"],
        whole=tuple(record["whole"]),
        event_time_unix_ns=record.get("event_time_unix_ns"),
        checksum=record["checksum"],
    )


def event_time_record(event_time_unix_ns: int | None) -> dict[str, int]:
    """What a record says of the newest event: nothing where it is not known."""
    return {} if event_time_unix_ns is None else {"event_time_unix_ns": event_time_unix_ns}


# What a rank holds: the tables of its run, and its shards of them. Rows name it by a number, its hash.


def pack_layout(tables: Sequence[TableSpec], shards: Sequence[Shard]) -> bytes:
    """The record of what a rank holds. A shard is: number of its table, first row, rows, first column, columns."""
    numbers = {table.name: number for number, table in enumerate(tables)}
    blocks = [[numbers[s.table.name], s.row_offset, s.rows, s.col_offset, s.cols] for s in shards]
    return pack_json({"tables": [spec_record(table) for table in tables], "shards": blocks})


def unpack_layout(record: memoryview) -> list[Shard]:
    """The shards that `pack_layout` has packed.

    Raises:
        ValueError, LookupError, TypeError: it is something else.
    """
    layout = unpack_json(record)
    tables = [spec_of_record(each) for each in layout["tables"]]
    return [Shard(tables[table], *block) for table, *block in layout["shards"]]


def layout_number(record: bytes) -> int:
    """The number by which rows name a layout."""
    return xxhash.xxh3_64_intdigest(record)


# Rows.


def pack_rows(slot: int, rows: RowBatch, layout: int = 0) -> tuple[Buffer, ...]:
    """The record of some rows, in pieces: a header, ids, and as far as there are any, digests and values.

    Args:
        slot: the number of the rows' shard in the layout, or of their table in a view.
        rows: the rows.
        layout: the number of the layout that has the shard; 0 = there is none, the slot is a view's.
    """
    values = rows.values.shape[1] > 0 and not rows.deleted
    flags = VALUES * values | DELETED * rows.deleted | DIGESTS * (rows.digests is not None)
    header = _HEADER.pack(FORMAT, _ROWS, flags, slot, len(rows), layout)
    columns = (rows.digests, rows.values if values else None)
    arrays = [np.asarray(rows.ids, ID_TYPE), *(each for each in columns if each is not None)]
    return header, *(np.ascontiguousarray(each).data for each in arrays if each.size)


def packed_bytes(rows: RowBatch) -> int:
    """Bytes of the record of some rows."""
    return _HEADER.size + rows.nbytes + (0 if rows.digests is None else rows.digests.nbytes)


def unpack_rows(record: memoryview, shards_of: Callable[[int], Sequence[Shard]]) -> RowBatch:
    """What `pack_rows` has packed, as views of the record; `shards_of` a layout, by its number.

    Raises:
        StorageFailed: its format, its kind or a column is not known.
        ValueError, LookupError: it does not fit its shard.
    """
    form, kind, columns, slot, count, layout = _HEADER.unpack_from(record)
    _check_known("format", form, FORMAT)
    _check_known("kind", kind, _ROWS)
    _check_known("columns", columns | _COLUMNS, _COLUMNS)
    shard = shards_of(layout)[slot]
    rest = _Columns(record[_HEADER.size :], count)
    ids = rest.take(ID_TYPE, 1)[:, 0]
    digests = rest.take(DIGEST_TYPE, 1)[:, 0] if columns & DIGESTS else None
    values = rest.take(shard.table.dtype, shard.cols if columns & VALUES else 0)
    if rest.left:
        raise ValueError(f"{rest.left} bytes more than its {count} rows take")
    if columns & DELETED:
        return RowBatch.deletes(shard, ids)
    return RowBatch(shard, ids, values, digests=digests)


class _Columns:
    def __init__(self, record: memoryview, count: int) -> None:
        self._record = record
        self._count = count

    @property
    def left(self) -> int:
        return len(self._record)

    def take(self, dtype: np.dtype[Any], width: int) -> "np.ndarray[Any, np.dtype[Any]]":
        """The next column, [rows, width]."""
        size = self._count * width * dtype.itemsize
        column, self._record = self._record[:size], self._record[size:]
        return np.frombuffer(column, dtype).reshape(self._count, width)


def _check_known(what: str, found: int, known: int) -> None:
    if found != known:
        raise StorageFailed(
            f"the log has rows of {what} {found}, this version reads {known}: update deltasync, or give it "
            "another --data-dir"
        )


_NAME = "data-format"
_START_EMPTY = "start with an empty --data-dir, and let the trainer publish its models"
# Streams that their owner reads as a whole at the start, by the small record that says that there is an owner.
_READ_BY_OWNERS = {"seals": "model", "layouts": "model", "cuts": "model", "releases": "view", "heads": "view"}


def check_log(log: LogStore, checkpoints: Path) -> None:
    """Check that this version can read a log, and note in a new one which format it has.

    Raises:
        StorageFailed: another version has written it, something in it is damaged, or it is empty although the
            folder `checkpoints` has something.
    """
    check_format(log)
    if not log.items(_NAME):
        if checkpoints.is_dir() and any(checkpoints.iterdir()):
            text = f"{checkpoints} has checkpoints, but the log beside it is missing"
            raise StorageFailed(f"{text}: make a data directory of them with deltasync restore; or {_START_EMPTY}")
        write_again(log).result()
        return
    _check_records(log)


def check_format(log: LogStore) -> None:
    """Check that this version can read a log; an empty one can be read.

    Raises:
        StorageFailed: another version has written it, or the record that says so is damaged.
    """
    found = log.items(_NAME).get("")
    if found is None:
        if log.items("") or log.streams():
            text = "the log was written by a version of deltasync from before data format 1, which is not read"
            raise StorageFailed(f"{text}: {_START_EMPTY}")
        return
    with reading(f"record {_NAME}"):
        number = int(found)
    if number != FORMAT:
        raise StorageFailed(
            f"the log is of format {number}, this version reads {FORMAT}: update deltasync, or give it another "
            "--data-dir"
        )


def write_again(log: LogStore) -> Future[None]:
    """Write what the log has already: done if it takes writes. It need not be readable for that."""
    return log.put(_NAME, b"%d" % FORMAT)


def _check_records(log: LogStore) -> None:
    """Look at all small records, and at the streams of which none of them says that somebody reads them."""
    small = log.items("")
    for stream in log.streams():
        kind, _, name = stream.partition("/")
        if f"{_READ_BY_OWNERS.get(kind)}/{name}" not in small:
            for _ in log.read(stream):
                pass


_ADDRESS = struct.Struct(">QII")  # Big-endian, so that LMDB's order of keys is that of addresses.
_CHECKSUM_BYTES = 8


def key_of(stream: str, number: int, part: int, index: int) -> bytes:
    """The key of a record."""
    return stream.encode() + b"\0" + _ADDRESS.pack(number, part, index)


def address_of(key: bytes) -> tuple[str, int, int, int]:
    """Stream, number, part and index of a record.

    Raises:
        StorageFailed: no record has such a key.
    """
    name, separator, address = (
        key[: -_ADDRESS.size - 1],
        key[-_ADDRESS.size - 1 : -_ADDRESS.size],
        key[-_ADDRESS.size :],
    )
    try:
        if separator == b"\0":
            return name.decode(), *_ADDRESS.unpack(address)
    except (UnicodeDecodeError, struct.error):
        pass
    raise damaged(f"record with the key {key!r}")


def with_checksum(key: bytes, *payload: Buffer) -> bytes:
    """What LMDB is to keep under a key."""
    return b"".join((_checksum(key, *payload), *payload))


def without_checksum(key: bytes, value: bytes, name: str, remedy: str = RESTORE) -> memoryview:
    """The payload of what LMDB has kept under a key.

    Raises:
        StorageFailed: key or payload have changed since; the record is called `name`, and the remedy said.
    """
    payload = memoryview(value)[_CHECKSUM_BYTES:]
    if value[:_CHECKSUM_BYTES] != _checksum(key, payload):
        raise damaged(name, remedy)
    return payload


def damaged(name: str, remedy: str = RESTORE) -> StorageFailed:
    """The error that a record is not as it was written."""
    return StorageFailed(f"the log's {name} is damaged: {remedy}")


def _checksum(key: bytes, *payload: Buffer) -> bytes:
    checksum = xxhash.xxh3_64(key)
    for piece in payload:
        checksum.update(piece)
    return checksum.digest()
