"""Logs of format 1, written as services of then did."""

import json
import struct
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb
import numpy as np
import xxhash
from tests.support.seals import sealed
from tests.support.wire import publish_open

from deltasync.core.rows import RowBatch
from deltasync.core.table_records import spec_record
from deltasync.core.tables import Shard, TableSpec
from deltasync.storage.records import seal_record


class Format1Log:
    """A log that is being written; a `with` block closes it."""

    def __init__(self, directory: Path, max_bytes: int = 1 << 24) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            self._env = undo.enter_context(lmdb.open(str(directory), map_size=max_bytes, max_dbs=3))
            self._parts, self._seals, self._meta = map(self._env.open_db, (b"parts", b"seals", b"meta"))
            undo.pop_all()

    def small(self, name: str, record: Any) -> None:
        with self._env.begin(write=True, db=self._meta) as txn:
            txn.put(name.encode(), json.dumps(record).encode())

    def model(self, name: str, tables: list[TableSpec], flushed: int = 0) -> None:
        described = {"history": "h", "flushed": flushed, "tables": [spec_record(table) for table in tables]}
        self.small(f"model/{name}", described)

    def part(self, name: str, number: int, part: int, index: int, payload: bytes) -> None:
        with self._env.begin(write=True, db=self._parts) as txn:
            key = name.encode() + b"\0" + struct.pack(">QII", number, part, index)
            txn.put(key, xxhash.xxh3_64_digest(payload) + payload)

    def seal(self, model: str, version: int, **fields: Any) -> None:
        record = seal_record(sealed(version, world_size=1)) | fields
        with self._env.begin(write=True, db=self._seals) as txn:
            txn.put(model.encode() + b"\0" + struct.pack(">Q", version), json.dumps(record).encode())

    def cut(self, model: str, version: int, batches: list[RowBatch], rank: int = 0) -> None:
        """A sealed cut of one rank that holds the shards of the rows."""
        shards = list(dict.fromkeys(rows.shard for rows in batches))
        self.opening(model, version, shards, rank)
        for index, rows in enumerate(batches, 1):
            head = struct.pack("<QQ", shards.index(rows.shard), len(rows))
            self.part(model, version, rank, index, head + rows.ids.tobytes() + rows.values.tobytes())
        self.seal(model, version, rows=sum(map(len, batches)))

    def opening(self, model: str, version: int, shards: list[Shard], rank: int = 0) -> None:
        """What a part began with."""
        tables = list(dict.fromkeys(shard.table for shard in shards))
        message = publish_open(model=model, tables=tables, shards=shards).open
        self.part(model, version, rank, 0, message.SerializeToString())

    def __enter__(self) -> "Format1Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._env.close()


def rows_of(shard: Shard, *ids: int, value: float = 1.0) -> RowBatch:
    """Rows that hold a number each, in every column."""
    values = np.full((len(ids), shard.cols), value, shard.table.dtype) + np.arange(len(ids))[:, None]
    return RowBatch(shard, np.array(ids), values.astype(shard.table.dtype))
