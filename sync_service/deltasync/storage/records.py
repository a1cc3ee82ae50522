"""What the log's records look like: names and layouts of the files' own, whatever Python calls things."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import ID_TYPE, Shard, TableSpec

_RECORD = struct.Struct("<QQ")


def pack_rows(slot: int, rows: RowBatch) -> tuple[bytes | memoryview, ...]:
    """The log's record of some rows, in pieces: slot and number of rows, ids, values."""
    return _RECORD.pack(slot, len(rows)), rows.ids.data, rows.values.data


def unpack_rows(record: memoryview, shards: list[Shard]) -> RowBatch:
    """What `pack_rows` has packed, as views of the record.

    Raises:
        InvalidInput: the record does not fit the shards.
    """
    slot, count = _RECORD.unpack_from(record)
    ids_end = _RECORD.size + count * ID_TYPE.itemsize
    return RowBatch.from_bytes(shards, slot, record[_RECORD.size : ids_end], record[ids_end:])


def seal_record(seal: Seal) -> dict[str, Any]:
    """The record of a seal."""
    return {
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
    }


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
        resync=record.get("resync", False),  # Seals of earlier versions lack it.
    )


def spec_record(spec: TableSpec) -> dict[str, Any]:
    """The record of what a table is."""
    return {"name": spec.name, "rows": spec.rows, "dim": spec.dim, "dtype": spec.dtype.str}


def spec_of_record(record: Mapping[str, Any]) -> TableSpec:
    """What the table is that a record describes."""
    return TableSpec(record["name"], record["rows"], record["dim"], np.dtype(record["dtype"]))
