"""Mending damaged rows of a model from what its log has of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from deltasync.core.errors import StorageFailed
from deltasync.core.id_sets import members
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.feeds.damage import IdsByTable, without
from deltasync.storage.log_store import LogUnavailable
from deltasync.storage.model_store import ModelStore
from deltasync.storage.volume import VolumeFailed


class LogMender:
    """Searches the log, in a thread of its own, for rows that it was not searched for before."""

    def __init__(self, store: ModelStore, run: Callable[..., Awaitable[Any]]) -> None:
        """`run` runs a function on the thread that changes the tables."""
        self._store = store
        self._run = run
        self._left: IdsByTable = {}  # What the log does not mend.
        # That of another model may be busy for long; a thread is only started with the first search.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-search")

    async def mend(self, rows: IdsByTable, seals: Sequence[Seal]) -> IdsByTable:
        """Mend rows, as far as the log has them with the cuts of these seals; returns those that are left."""
        left = await self._run(self._still_damaged, rows) if rows else {}
        if left:
            new, loop = without(left, self._left), asyncio.get_running_loop()
            logged = await loop.run_in_executor(self._thread, _logged, self._store, new, seals) if new else []
            left = await self._run(self._mend, logged, left)
        self._left = left
        return left

    async def close(self) -> None:
        """Wait until the log is not searched any more, also for somebody who has gone."""
        await asyncio.to_thread(self._thread.shutdown)

    # On the thread that changes the tables.

    def mended_by(self, version: int, rows: IdsByTable) -> IdsByTable:
        """Those of the damaged rows that a version, which was just applied, has brought, and that are whole."""
        pairs = [(table.spec.name, table.numbers(rows[table.spec.name])) for table in self._named(rows)]
        brought = {name: rows[name][numbers == version] for name, numbers in pairs}
        mended = without(brought, self._damaged(brought))
        self._count(mended, without(rows, mended))
        return mended

    def _still_damaged(self, rows: IdsByTable) -> IdsByTable:
        left = self._damaged(rows)
        self._count(rows, left)
        return left

    def _damaged(self, rows: IdsByTable) -> IdsByTable:
        found = {table.spec.name: table.damaged(rows[table.spec.name]) for table in self._named(rows)}
        return {name: ids for name, ids in found.items() if len(ids)}

    def _count(self, mended: IdsByTable, left: IdsByTable) -> None:
        """Some digests may have been damaged, and counted: count those of tables of which no row is left."""
        for table in self._named(mended):
            if table.spec.name not in left:
                table.count()

    def _mend(self, logged: Sequence[tuple[int, RowBatch]], rows: IdsByTable) -> IdsByTable:
        rows = self._still_damaged(rows)  # A cut may have brought others since the log was read.
        for table in self._named(rows):
            ids = rows[table.spec.name]
            _mend_logged(table, ids, [each for each in logged if each[1].table.name == table.spec.name])
            # Last: where a full part does not name a row, no record deletes it.
            table.mend(RowBatch.deletes(Shard.whole(table.spec), ids[table.deleted(ids)]))
        return self._still_damaged(rows)

    def _named(self, rows: IdsByTable) -> list[StampedTable]:
        return [table for table in self._store.tables if table.spec.name in rows]


def _logged(store: ModelStore, wanted: IdsByTable, seals: Iterable[Seal]) -> list[tuple[int, RowBatch]]:
    """What the log has of some rows, in the order of these cuts, but for records that are damaged. Each with the
    version that it is of.

    Raises:
        StorageFailed: it cannot be read now.
    """
    found = []
    for seal in seals:
        try:
            among = (rows.among(wanted.get(rows.table.name, ())) for rows in store.rows(seal))
            found += [(seal.version, some) for some in among if len(some)]
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed:
            continue
    return found


def _mend_logged(table: StampedTable, ids: Ids, logged: Iterable[tuple[int, RowBatch]]) -> None:
    """Write some rows of a table as the log has them: batches, and the versions that they are of."""
    numbers, sound = table.numbers(ids), np.zeros(len(ids), np.bool_)
    for version, batch in logged:
        some = batch.among(ids[numbers >= version])  # Those of a later one are not applied yet.
        table.mend(some)
        if batch.shard.cols == table.spec.dim:
            sound |= (numbers == version) & members(ids, some.ids)
    table.trust(ids[sound])  # They are what was stored last: what still does not fit is the digest.
