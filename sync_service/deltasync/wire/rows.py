"""Rows in messages: cut into chunks, and checked where they come from outside."""

from collections.abc import Iterator

import numpy as np

from deltasync.core.errors import InvalidInput
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import ID_TYPE, Shard
from deltasync.v1 import tables_pb2

# Just under 1,000,000 bytes: faster than 64 KiB or 4 MiB, and below the default limits of gRPC and brokers.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20


def chunked(ids: Ids, values: Values) -> Iterator[tuple[Ids, Values]]:
    """Slices of `ids` ([n] int64) and `values` ([n, cols]), each of at most `CHUNK_BYTES` or of one row."""
    step = max(1, CHUNK_BYTES // (ID_TYPE.itemsize + values.shape[1] * values.itemsize))
    for start in range(0, len(ids), step):
        yield ids[start : start + step], values[start : start + step]


def fill_rows(message: tables_pb2.Rows, slot: int, ids: Ids, values: Values) -> None:
    """Let a message carry `ids` ([n] int64) and their `values` ([n, cols]).

    The message is filled in place: assigning a filled one to a field of another would copy it.
    """
    message.slot = slot
    message.ids = ids.astype(ID_TYPE, copy=False).tobytes()
    message.values = values.tobytes()


def decode_rows(message: tables_pb2.Rows, shards: list[Shard]) -> RowBatch:
    """The rows a message carries, as views of its bytes.

    Raises:
        InvalidInput: no such shard, or lengths that do not fit it.
    """
    if message.slot >= len(shards):
        raise InvalidInput(f"rows for slot {message.slot}, but only {len(shards)} were announced")
    return RowBatch.from_bytes(shards[message.slot], message.ids, message.values)


def check_rows(batch: RowBatch) -> None:
    """Check rows against the rules that every sender has to keep.

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
