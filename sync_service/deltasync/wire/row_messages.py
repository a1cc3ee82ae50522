"""Rows in messages, cut into chunks."""

from collections.abc import Iterator

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
    return RowBatch.from_bytes(shards, message.slot, message.ids, message.values)
