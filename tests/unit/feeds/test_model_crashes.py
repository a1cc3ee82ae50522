"""A model against plain tables: cuts, growth, flushes that the disk breaks off anywhere, and crashes."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.folders import fast_folder
from tests.support.mapping import check_noted
from tests.support.memory_store import MemoryDisk, MemoryStore
from tests.support.seals import sealed

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.model import Model
from deltasync.kernels import touched as kernels
from deltasync.kernels.touched import Bytes, Marks
from deltasync.storage import mapping, table_files
from deltasync.storage.model_records import recorded_models
from deltasync.storage.private_memory import PrivateMemory
from deltasync.storage.records import pack_layout

TABLES = [TableSpec("wide", 300, 12), TableSpec("short", 90, 3, np.dtype("<f2"))]
# Where the columns of shards end. Of 12 segments, digests take more than the rows.
EDGES: list[Callable[[int], list[int]]] = [
    lambda dim: [0, dim],
    lambda dim: [0, dim // 2, dim],
    lambda dim: [0, 1, dim],
    lambda dim: list(range(dim + 1)),
]
SECTOR, MORE = 512, 70
CALLS = ["cut", "cut", "cut", "whole", "delete", "flush", "break_off", "overtake", "grow", "grow_slowly", "crash"]


class Play:
    """A model, and what it has to be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._disk = MemoryDisk()
        self._log = MemoryStore(self._disk, 1 << 26)
        self.model = Model("m", self._log, folder)
        self.plain = {table.name: StampedTable.zeros(table) for table in TABLES}

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
            self.model.store.append(version, 0, index, index, batch, use.number)
        names = tuple(self.plain) if whole else ()
        seal = replace(sealed(version, world_size=1), rows=sum(map(len, batches)), whole=names)
        self.model.store.seal(seal).result(20)
        self.model.seals.append(seal)
        await self.model.apply_cut(seal, batches if seed % 2 else None)
        self._expect(batches, version, names)

    async def whole(self, seed: int) -> None:
        await self.cut(seed, whole=True)

    async def delete(self, seed: int) -> None:
        await self.cut(seed, deleted=True)

    async def flush(self, _: int) -> None:
        await asyncio.to_thread(self.model.flush)

    async def break_off(self, seed: int) -> None:
        """Some files are written, of another any sectors, and then it is refused."""
        rng, left = np.random.default_rng(seed), iter(range(seed % 4, -100, -1))
        now = next(left)

        def writing(*arguments: Any) -> int:
            return kernels.write(*arguments) if now > 0 else _torn(rng, *arguments)

        def ended(_: Any) -> int:
            nonlocal now
            refused, now = now <= 0, next(left)
            if refused:
                raise OSError(5, "Input/output error")
            return 0

        with (
            mock.patch.object(mapping, "kernels", mock.Mock(write=writing)),
            mock.patch.object(os, "fdatasync", ended),
            mock.patch.object(mapping._c, "msync", return_value=-(seed % 2)),
            contextlib.suppress(StorageFailed),
        ):
            await self.flush(seed)

    async def overtake(self, seed: int) -> None:
        """A cut is applied while a flush is under way."""
        loop, write = asyncio.get_running_loop(), table_files.flush

        def flushing(tables: Any) -> None:
            asyncio.run_coroutine_threadsafe(self.cut(seed), loop).result(20)
            write(tables)

        with mock.patch("deltasync.storage.model_store.flush", flushing):
            await asyncio.to_thread(self.model.flush)

    async def grow(self, seed: int) -> None:
        self.model.published = self._published
        await self.model.add_tables(self._grown(seed), later_run=True)
        self._expect_more(seed)

    async def grow_slowly(self, seed: int) -> None:
        """While room is made, a cut of the run before is applied, perhaps flushed, and the service may end."""
        steps = await asyncio.to_thread(self.model.store.change, self._grown(seed), self._published)
        await self.cut(seed // 2)
        if seed % 3:
            await self.flush(seed)
        if seed % 5 == 0:
            self._expect_more(seed)
            await self.crash(seed)
            return
        await self.model.on_thread(lambda: [step() for step in steps])
        self._expect_more(seed)

    async def crash(self, _: int) -> None:
        """What is only in memory is lost."""
        await self.close()
        self._log = MemoryStore(self._disk, 1 << 26)
        self.model = Model("m", self._log, self._folder)
        await self.model.recover(recorded_models(self._log)["m"])

    # What is looked at.

    async def check(self) -> None:
        assert {table.spec.name for table in self.model.tables} == set(self.plain)
        for table in self.model.tables:
            plain = self.plain[table.spec.name]
            assert table.spec == plain.spec
            if table.mapped.files.mappings[0].private:
                check_noted(table.mapped.files, table.mapped.layout.arrays())
            np.testing.assert_array_equal(table.rows, plain.rows)
            np.testing.assert_array_equal(table.stamps, plain.stamps)
            assert not len(table.untagged()), "no crash looks like damage"
            assert not table.restamped
            np.testing.assert_array_equal(table.digests.sum(axis=1), plain.digests.sum(axis=1))
            assert table.checksum == plain.checksum
            assert not len(table.damaged(np.arange(plain.spec.rows)))
            assert table.norm == pytest.approx(plain.norm, rel=1e-6)
            assert table.changed_since(0).tolist() == plain.changed_since(0).tolist()

    async def close(self) -> None:
        await asyncio.to_thread(self.model._thread.shutdown)
        self._log.close()

    @property
    def _published(self) -> dict[str, int]:
        """Every table, whether it has rows by now or not: of those that were never published others may come."""
        return {name: plain.spec.rows for name, plain in self.plain.items()}

    def _grown(self, seed: int) -> list[TableSpec]:
        return [
            replace(self.plain[name].spec, rows=self.plain[name].spec.rows + MORE) for name in self._growing(seed)
        ]

    def _growing(self, seed: int) -> Sequence[str]:
        return list(self.plain)[: 1 + seed % 2]

    def _expect_more(self, seed: int) -> None:
        for name, spec in zip(self._growing(seed), self._grown(seed), strict=True):
            plain = self.plain[name]
            arrays = [_longer(each) for each in (plain.rows, plain.stamps, plain.digests, plain.squares)]
            self.plain[name] = StampedTable(spec, arrays[0], arrays[1], arrays[2], arrays[3], plain.columns)

    def _expect(self, batches: Sequence[RowBatch], version: int, whole: Sequence[str]) -> None:
        for batch in batches:
            self.plain[batch.table.name].apply(batch, version)
        for name in whole:
            plain = self.plain[name]
            plain.apply(RowBatch.deletes(Shard.whole(plain.spec), plain.not_stamped(version)), version)


def _longer(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros((MORE, *array.shape[1:]), array.dtype)])


def _torn(
    rng: np.random.Generator,
    descriptor: int,
    offset: int,
    content: Bytes,
    marks: Marks,
    bit: int,
    block: int,
    _: int,
) -> int:
    """Write every other sector of what is to be written."""
    for first in (np.flatnonzero(marks & bit) * block).tolist():
        for start in range(first, min(first + block, len(content)), SECTOR):
            if rng.integers(2):
                os.pwrite(
                    descriptor, content[start : min(start + SECTOR, first + block)].tobytes(), offset + start
                )
    return len(content)


def _batch(shard: Shard, ids: Ids, rng: np.random.Generator, *, deleted: bool) -> RowBatch:
    if deleted:
        return RowBatch.deletes(Shard.whole(shard.table), ids)
    return RowBatch(shard, ids, rng.normal(size=(len(ids), shard.cols)).astype(shard.table.dtype))


@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 24], ids=["files of their own", "a shared file"])
@settings(suppress_health_check=list(HealthCheck))
@given(history=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1000)), max_size=14))
def test_a_model_comes_back_whenever_it_ends(
    private: bool, small_bytes: int, history: list[tuple[str, int]]
) -> None:
    async def main(folder: Path) -> None:
        play = Play(folder)
        try:
            await play.model.add_tables(TABLES)
            for call, seed in [*history, ("crash", 0)]:
                await getattr(play, call)(seed)
                await play.check()
        finally:
            await play.close()

    memory = mock.patch.object(mapping, "PRIVATE", PrivateMemory(1 << 40 if private else 0))
    small = mock.patch.object(table_files, "SMALL_BYTES", small_bytes)
    with fast_folder() as folder, memory, small:
        asyncio.run(main(Path(folder)))
