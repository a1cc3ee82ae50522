"""A model against plain tables: cuts, growth, removals, checkpoints that break off anywhere, and crashes."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import commit
from tests.support.memory_store import MemoryDisk, MemoryStore
from tests.support.seals import sealed

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.records import pack_layout, pack_rows
from deltasync.model.model import Model
from deltasync.model.model_store import recorded_models

TABLES = [TableSpec("wide", 300, 12), TableSpec("short", 90, 3, np.dtype("<f2"))]
# Where the columns of shards end.
EDGES: list[Callable[[int], list[int]]] = [
    lambda dim: [0, dim],
    lambda dim: [0, dim // 2, dim],
    lambda dim: [0, 1, dim],
    lambda dim: list(range(dim + 1)),
]
MORE = 70
CALLS = ["cut", "cut", "cut", "whole", "delete", "checkpoint", "break_off", "overtake", "grow", "remove", "crash"]


class Play:
    """A model, and what it has to be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._disk = MemoryDisk()
        self._begin()
        self.plain = {table.name: StampedTable(table) for table in TABLES}

    def _begin(self) -> None:
        self._log = MemoryStore(self._disk, 1 << 26)
        self.model = Model("m", self._log, CheckpointStore("m", Place(str(self._folder)), None))

    # What can happen.

    async def cut(self, seed: int, *, deleted: bool = False, whole: bool = False) -> None:
        rng, version = np.random.default_rng(seed), self.model.seals.newest_version + 1
        batches = list[RowBatch]()
        for table in self.plain.values():
            ids = np.unique(rng.integers(0, table.spec.rows, 1 + seed % 5))
            edges = EDGES[seed % len(EDGES)](table.spec.dim)
            shards = [Shard(table.spec, 0, table.spec.rows, a, b - a) for a, b in pairwise(edges)]
            shards = shards if whole else [shards[seed % len(shards)]]
            batches += [_batch(shard, ids, rng, deleted=deleted) for shard in shards]
        shards = [batch.shard for batch in batches]
        layout = pack_layout([table.spec for table in self.plain.values()], shards)
        use = self.model.store.use_layout(layout, shards, version)
        for index, batch in enumerate(batches):
            self.model.store.append(version, 0, index, pack_rows(index, batch, use.number))
        names = tuple(self.plain) if whole else ()
        seal = replace(sealed(version, world_size=1), rows=sum(map(len, batches)), whole=names)
        seal = seal.after(self.model.seals.newest)
        await commit(self.model, seal, batches if seed % 2 else None)
        self._expect(batches, version, names)

    async def whole(self, seed: int) -> None:
        await self.cut(seed, whole=True)

    async def delete(self, seed: int) -> None:
        await self.cut(seed, deleted=True)

    async def checkpoint(self, _: int, check: Callable[[], None] = lambda: None) -> None:
        if self.model.head:
            await self.model.checkpoint(list, dict, check)

    async def break_off(self, seed: int) -> None:
        """A checkpoint ends at any of its steps."""
        left = iter(range(seed % 5, -1, -1))

        def check() -> None:
            if next(left, 0) <= 0:
                raise StorageFailed("broken off")

        with contextlib.suppress(StorageFailed):
            await self.checkpoint(seed, check)

    async def overtake(self, seed: int) -> None:
        """A cut is applied while a checkpoint is written."""
        loop, once = asyncio.get_running_loop(), iter([True])

        def check() -> None:
            if next(once, False):
                asyncio.run_coroutine_threadsafe(self.cut(seed), loop).result(20)

        await self.checkpoint(seed, check)

    async def grow(self, seed: int) -> None:
        names = list(self.plain)[: 1 + seed % 2]
        specs = [
            replace(self.plain[name].spec, rows=self.plain[name].spec.rows + MORE)
            for name in names
            if self.model.tables.published.get(name)
        ]
        await self.model.tables.add(specs, later_run=True)
        for spec in specs:
            self.plain[spec.name].grown(spec)()

    async def remove(self, seed: int) -> None:
        """A table goes, and sometimes another of its name comes."""
        if self.model.tables.published.get("short"):
            await self.model.tables.remove("short")
            del self.plain["short"]
        if seed % 2 and "short" not in self.plain:
            await self.model.tables.add([TABLES[1]], later_run=True)
            self.plain["short"] = StampedTable(TABLES[1])

    async def crash(self, _: int) -> None:
        """What is only in memory is lost."""
        await self.close()
        self._begin()
        if record := recorded_models(self._log).get("m"):
            await self.model.recover(record)

    def damage_seal(self, version: int) -> None:
        self._disk.streams["seals/m"][version, 0, 0] = b"{}"

    # What is looked at.

    async def check(self) -> None:
        assert not self.model.problems
        assert {table.spec.name for table in self.model.tables} == set(self.plain)
        for table in self.model.tables:
            plain = self.plain[table.spec.name]
            assert table.spec == plain.spec
            np.testing.assert_array_equal(table.rows, plain.rows)
            np.testing.assert_array_equal(table.stamps, plain.stamps)
            np.testing.assert_array_equal(table.digests, plain.digests)
            assert table.checksum == plain.checksum
            assert table.norm == pytest.approx(plain.norm, rel=1e-6)
            assert table.changed_since(0).tolist() == plain.changed_since(0).tolist()

    async def close(self) -> None:
        await self.model.stop()
        self._log.close()

    def _expect(self, batches: Sequence[RowBatch], version: int, whole: Sequence[str]) -> None:
        for batch in batches:
            self.plain[batch.table.name].apply(batch, version)
        for name in whole:
            plain = self.plain[name]
            plain.apply(RowBatch.deletes(Shard.whole(plain.spec), plain.not_stamped(version)), version)


def _batch(shard: Shard, ids: Ids, rng: np.random.Generator, *, deleted: bool) -> RowBatch:
    if deleted:
        return RowBatch.deletes(Shard.whole(shard.table), ids)
    return RowBatch(shard, ids, rng.normal(size=(len(ids), shard.cols)).astype(shard.table.dtype))


@settings(suppress_health_check=list(HealthCheck))
@given(history=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1000)), max_size=14))
def test_a_model_comes_back_whenever_it_ends(history: list[tuple[str, int]]) -> None:
    async def main(folder: Path) -> None:
        play = Play(folder)
        try:
            await play.model.tables.add(TABLES)
            for call, seed in [*history, ("crash", 0)]:
                await getattr(play, call)(seed)
                await play.check()
        finally:
            await play.close()

    with fast_folder() as folder:
        asyncio.run(main(Path(folder)))


async def test_a_damaged_seal_from_before_the_checkpoint_costs_no_version(tmp_path: Path) -> None:
    play = Play(tmp_path)
    await play.model.tables.add(TABLES)
    for seed in range(3):
        await play.cut(seed)
    await play.checkpoint(0)
    await play.cut(3)
    play.damage_seal(1)
    await play.crash(0)
    assert play.model.seals.newest_version == 4
    (problem,) = play.model.problems
    assert "seal of version 1" in problem
    play.model.problems.clear()
    await play.check()
    await play.close()
