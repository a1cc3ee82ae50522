"""What the log's records are to LMDB: their keys, and the checksum ahead of each payload."""

import struct

import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import Buffer

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
