"""Rows in messages, cut into chunks."""

from collections.abc import Iterator

from deltasync.core.rows import RowBatch
from deltasync.core.tables import DIGEST_TYPE, ID_TYPE, Shard
from deltasync.v1 import tables_pb2

# Just under 1,000,000 bytes: faster than 64 KiB or 4 MiB, and below the default limits of gRPC and brokers.
CHUNK_BYTES = 990_000
MAX_CHUNK_BYTES = 1 << 20


def chunked(rows: RowBatch) -> Iterator[RowBatch]:
    """Some rows in pieces, each of at most `CHUNK_BYTES` or of one row."""
    return rows.blocks(max(1, CHUNK_BYTES // rows.shard.row_bytes))


def fill_rows(message: tables_pb2.Rows, slot: int, rows: RowBatch) -> None:
    """Let a message carry some rows of the shard, or table, that has the number `slot`.

    The message is filled in place: assigning a filled one to a field of another would copy it.
    """
    message.slot = slot
    message.ids = rows.ids.astype(ID_TYPE, copy=False).tobytes()
    message.deleted = rows.deleted
    if not rows.deleted:
        message.values = rows.values.tobytes()
        if rows.digests is not None:
            message.digests = rows.digests.astype(DIGEST_TYPE, copy=False).tobytes()


def decode_rows(message: tables_pb2.Rows, shards: list[Shard]) -> RowBatch:
    """The rows a message carries, as views of its bytes.

    Raises:
        InvalidInput: no such shard, or lengths that do not fit it.
    """
    return RowBatch.from_bytes(
        shards,
        message.slot,
        message.ids,
        message.values,
        deleted=message.deleted,
        raw_digests=message.digests,
    )
