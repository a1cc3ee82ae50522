"""Damages a log by flipping bits of its records."""

from pathlib import Path
from typing import Any

import lmdb


def change_value(directory: Path, database: str, key: bytes, bit: int) -> None:
    """Flip one bit of the value of a key; bit -1 is the last."""
    environment, records = _open(directory, database)
    with environment.begin(write=True, db=records) as txn:
        txn.put(key, flipped(bytes(txn.get(key) or b""), bit))
    environment.close()


def change_key(directory: Path, database: str, key: bytes, bit: int) -> None:
    """Flip one bit of a key."""
    environment, records = _open(directory, database)
    with environment.begin(write=True, db=records) as txn:
        txn.put(flipped(key, bit), bytes(txn.pop(key) or b""))
    environment.close()


def forget(directory: Path, database: str, key: bytes) -> None:
    """Delete a key."""
    environment, records = _open(directory, database)
    with environment.begin(write=True, db=records) as txn:
        assert txn.delete(key)
    environment.close()


def entries(directory: Path, database: str) -> dict[bytes, bytes]:
    """All keys and values."""
    environment, records = _open(directory, database)
    with environment.begin(db=records) as txn:
        found = {bytes(key): bytes(value) for key, value in txn.cursor()}
    environment.close()
    return found


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit flipped."""
    number = int.from_bytes(data, "big") ^ (1 << (len(data) * 8 - 1 - bit % (len(data) * 8)))
    return number.to_bytes(len(data), "big")


def _open(directory: Path, database: str) -> tuple[lmdb.Environment, Any]:
    environment = lmdb.open(str(directory), max_dbs=4, map_size=1 << 28)
    return environment, environment.open_db(database.encode())
