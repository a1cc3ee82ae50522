"""Writes many small versions to the log of a model, to see how large it becomes.

python -m tests.support.versions FOLDER 1000000
"""

import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import pack_json, pack_layout, pack_rows
from deltasync.model.model_store import KEPT_SEALS, ModelStore

TABLE = TableSpec("user", 1000, 16)
SHARD = Shard.whole(TABLE)
_LAYOUT = pack_layout([TABLE], [SHARD])
_AT_ONCE = 500


@dataclass(frozen=True)
class Size:
    """Disk usage of a folder: files, bytes, and bytes of the log's file."""

    version: int
    files: int
    bytes: int
    log_bytes: int


def publish(folder: Path, count: int, looks: int, kept_seals: int = KEPT_SEALS) -> Iterator[Size]:
    """Publish many versions of one row each, with as many offsets and a new layout every thousand versions.

    Truncates the log at least as often as the service does. Yields the size at intervals.
    """
    log = LmdbStore(LogOptions(directory=folder / "log", max_bytes=1 << 30))
    store, before = ModelStore(log, "clicks", kept_seals), None
    store.describe({TABLE.name: TABLE})
    writes = list[Future[None]]()
    run = uuid.uuid4().hex
    for version in range(1, count + 1):
        before = _seal(version, run).after(before)
        writes += [*_cut(store, before), log.put("offset/c/p", pack_json({"version": version}))]
        if version % _AT_ONCE == 0 or version == count:
            for write in writes:
                write.result()
            writes.clear()
        if version - store.dropped >= kept_seals // 2:
            store.truncate(version)
        if version % (count // looks) == 0:
            yield _size(folder, version)
    log.close()


def _cut(store: ModelStore, seal: Seal) -> list[Future[None]]:
    layout = _LAYOUT + b" " * (seal.version // 1000)  # JSON, whatever follows it.
    rows = RowBatch(SHARD, np.array([seal.version % TABLE.rows]), np.ones((1, TABLE.dim), np.float32)).digested()
    store.drop_part(seal.version, 0)
    use = store.use_layout(layout, [SHARD], seal.version)
    return [store.append(seal.version, 0, 0, pack_rows(0, rows, use.number)), store.seal(seal)]


def _seal(version: int, run: str) -> Seal:
    now = time.time_ns()
    return Seal(
        version=version,
        step=version,
        run=run,
        run_started_unix_ns=now,
        world_size=1,
        rows=1,
        bytes=72,
        log_bytes=104,
        step_end_unix_ns=now,
        sealed_unix_ns=now,
        event_time_unix_ns=now,
    )


def _size(folder: Path, version: int) -> Size:
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    log = (folder / "log" / "data.mdb").stat()
    return Size(version, len(files), 512 * sum(each.st_blocks for each in files), 512 * log.st_blocks)


if __name__ == "__main__":
    for each in publish(Path(sys.argv[1]), int(sys.argv[2]), looks=20):
        print(each, flush=True)  # noqa: T201
