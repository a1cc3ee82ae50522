"""Releases: what they hold, in memory or spilled, of a cut or of tables, shared by replicas."""

import asyncio
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel
from tests.support.mapping import in_a_file, mapping_of
from tests.support.releases import deleted_rows, frozen_at, live_rows
from tests.support.stamped import stamped_table
from tests.support.wire import random_rows

from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds import releases
from deltasync.feeds.cut_rows import cut_rows
from deltasync.feeds.frozen_release import FrozenRelease

TABLES = [TableSpec("a", 40, 3), TableSpec("b", 20, 2, np.dtype("<f2")), TableSpec("c", 5, 1)]


def stamped(seed: int, versions: int) -> list[StampedTable]:
    rng = np.random.default_rng(seed)
    made = []
    for table, rows in zip(TABLES, random_rows(seed, TABLES), strict=True):
        stamps = rng.integers(0, versions + 1, table.rows)
        made.append(stamped_table(table, rows, stamps))
    return made


def content(frozen: FrozenRelease) -> list[tuple[int, list[int], bytes]]:
    return [(slot, rows.ids.tolist(), rows.values.tobytes()) for slot, rows in live_rows(frozen).items()]


def arrays(frozen: FrozenRelease) -> list[Values]:
    return [array for chunk in frozen.chunks for array in (chunk.rows.ids, chunk.rows.values)]


@given(st.integers(0, 999), st.integers(0, 4))
def test_a_spilled_release_is_the_same_as_one_in_memory(seed: int, after: int) -> None:
    tables = stamped(seed, 4)
    with tempfile.TemporaryDirectory() as folder:
        in_memory = frozen_at(tables, after, None, Path(folder), 1 << 20)
        spilled = frozen_at(tables, after, None, Path(folder), 0)
        assert not list(Path(folder).iterdir())
    assert all(in_a_file(array) for array in arrays(spilled))
    assert not any(in_a_file(array) for array in arrays(in_memory))
    assert spilled.memory_bytes == 0
    assert in_memory.memory_bytes == sum(array.nbytes for array in arrays(in_memory))
    assert content(spilled) == content(in_memory)
    for kept, unkept in zip(in_memory.chunks, spilled.chunks, strict=True):
        assert kept.message is not None
        assert unkept.message is None
        assert kept.sent() == unkept.sent()
    expected = [np.flatnonzero(table.stamps > after) for table in tables]
    assert [ids for _, ids, _ in content(in_memory)] == [ids.tolist() for ids in expected if len(ids)]
    assert in_memory.rows == sum(len(ids) for ids in expected)


def test_a_spilled_release_is_mapped_once(tmp_path: Path) -> None:
    """Each subscriber may lack something else, of thousands of tables."""
    release = frozen_at(stamped(0, 4), 0, None, tmp_path, 0)
    bases = {id(mapping_of(array)) for array in arrays(release)}
    assert len(release.chunks) > len(bases) == 1


def test_a_release_does_not_change_with_its_tables(tmp_path: Path) -> None:
    tables = stamped(0, 4)
    frozen = frozen_at(tables, 0, None, tmp_path, 1 << 20)
    before = content(frozen)
    for table in tables:
        table.apply(RowBatch.of_table(table.spec, np.arange(table.spec.rows), np.zeros_like(table.rows)), 9)
    assert content(frozen) == before


def test_deletes_take_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    table = StampedTable.zeros(TABLES[0])
    table.apply(RowBatch.of_table(table.spec, np.arange(9), np.ones((9, 3), np.float32)), 1)
    table.apply(RowBatch.deletes(Shard.whole(table.spec), np.arange(2, 8)), 2)
    in_memory, spilled = (frozen_at([table], 1, None, tmp_path, size) for size in (48, 47))
    assert (in_memory.memory_bytes, spilled.memory_bytes) == (48, 0)
    assert [in_a_file(each.chunks[0].rows.ids) for each in (in_memory, spilled)] == [False, True]
    assert [deleted_rows(each)[0].ids.tolist() for each in (in_memory, spilled)] == [[2, 3, 4, 5, 6, 7]] * 2


def test_what_a_spilled_release_takes_is_freed_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """To unmap gigabytes takes a while, and the last to use a release is the event loop."""
    freed, by = threading.Event(), list[str]()

    def note() -> None:
        by.append(threading.current_thread().name)
        freed.set()

    release = frozen_at(stamped(0, 4), 0, None, tmp_path, 0)
    weakref.finalize(release.chunks[0].rows.values.base, note)
    del release
    assert freed.wait(20)
    assert by == ["release-freeing"]


CUT_TABLES = [TableSpec("a", 12, 2), TableSpec("b", 6, 3, np.dtype("<f2"))]
SLOTS = {table.name: slot for slot, table in enumerate(CUT_TABLES)}
WHOLE = [Shard.whole(table) for table in CUT_TABLES]
# The second half of a table, and one of its columns: what ranks may hold beside all of it.
SHARDS = [*WHOLE, Shard(CUT_TABLES[0], 6, 6, 0, 2), Shard(CUT_TABLES[0], 0, 12, 1, 1)]

Rows = dict[tuple[int, int], bytes | None]


@st.composite
def batches(draw: st.DrawFn, shards: list[Shard]) -> RowBatch:
    shard = draw(st.sampled_from(shards))
    rows = range(shard.row_offset, shard.row_offset + shard.rows)
    ids = np.array(sorted(draw(st.sets(st.sampled_from(rows), max_size=5))), np.int64)
    if draw(st.booleans()):
        return RowBatch.deletes(shard, ids)
    values = np.full((len(ids), shard.cols), draw(st.integers(-9, 9)), shard.table.dtype)
    return RowBatch(shard, ids, values).digested()


def rows_of(found: list[tuple[int, RowBatch]]) -> Rows:
    rows: Rows = {}
    for slot, batch in found:
        assert batch.shard == WHOLE[slot]
        for row, values in zip(batch.ids.tolist(), batch.values, strict=True):
            assert (slot, row) not in rows
            rows[slot, row] = None if batch.deleted else values.tobytes()
    return rows


@given(st.lists(batches(WHOLE), max_size=4), st.lists(batches(SHARDS), max_size=5))
def test_a_cut_is_what_the_tables_hold_of_it_or_is_not_used(before: list[RowBatch], cut: list[RowBatch]) -> None:
    tables = [StampedTable.zeros(table) for table in CUT_TABLES]
    for version, some in ((1, before), (2, cut)):
        for batch in some:
            tables[SLOTS[batch.table.name]].apply(batch, version)
    found = cut_rows(cut, SLOTS)
    with tempfile.TemporaryDirectory() as folder:
        frozen = frozen_at(tables, 1, None, Path(folder), 1 << 20)
    named = [(batch.table.name, row) for batch in cut for row in batch.ids.tolist()]
    if found is not None:
        assert rows_of(found) == rows_of([(chunk.slot, chunk.rows) for chunk in frozen.chunks])
    elif len(set(named)) == len(named):
        assert any(batch.shard.cols < batch.table.dim for batch in cut) or _interleaved(cut)


def _interleaved(cut: list[RowBatch]) -> bool:
    """Whether a row of a batch lies between those of another of the same table and sort."""
    filled = [batch for batch in cut if len(batch)]
    pairs = [
        (some, other) for some in filled for other in filled if some is not other and some.table == other.table
    ]
    return any(
        some.deleted == other.deleted and some.ids[0] <= other.ids[0] <= some.ids[-1] for some, other in pairs
    )


def test_the_parts_of_many_ranks_are_few_messages() -> None:
    cut = [
        RowBatch(Shard(CUT_TABLES[0], row, 1, 0, 2), np.array([row]), np.full((1, 2), row, "<f4"))
        for row in range(12)
    ]
    found = cut_rows(reversed(cut), SLOTS)
    assert found is not None
    ((slot, rows),) = found
    assert (slot, rows.ids.tolist(), rows.values[:, 0].tolist()) == (0, list(range(12)), list(range(12)))


TABLE = TableSpec("user", 12, 2)
BYTES = TABLE.rows * TABLE.row_bytes

# Rows are written, or deleted; a replica at a number asks, and keeps its release, or one is given up.
ids = st.sets(st.integers(0, TABLE.rows - 1), min_size=1)
changes = st.tuples(st.sampled_from(["write", "write", "delete"]), ids)
asked = st.tuples(st.just("ask"), st.integers(0, 9))
events = st.one_of(asked, asked, asked, changes, st.tuples(st.just("give up"), st.integers(0, 20)))


@given(st.lists(changes, min_size=5, max_size=9), st.lists(events, min_size=8, max_size=24))
def test_whoever_is_sent_a_release_holds_the_tables_of_its_head(
    before: list[tuple[str, object]], events: list[tuple[str, object]]
) -> None:
    memory, releases.RELEASES_IN_MEMORY_BYTES = releases.RELEASES_IN_MEMORY_BYTES, 0
    try:
        with fast_folder() as folder:
            asyncio.run(asyncio.wait_for(_play(Path(folder), [*before, *events]), 20))
    finally:
        releases.RELEASES_IN_MEMORY_BYTES = memory


async def _play(folder: Path, events: Sequence[tuple[str, object]]) -> None:
    local = await LocalModel.opened(folder)
    await local.add(TABLE)
    past = [np.zeros((TABLE.rows, TABLE.dim), "<f4")]
    held: list[FrozenRelease] = []
    waiting: list[tuple[int, asyncio.Future[FrozenRelease]]] = []
    try:
        for kind, value in events:
            if kind in ("write", "delete"):
                await _cut(local, past, np.array(sorted(value)), deleted=kind == "delete")  # type: ignore[call-overload]
            elif kind == "ask":
                number = min(int(value), len(past) - 1)  # type: ignore[call-overload]
                waiting.append((number, local.model.release(number)))
            elif held:
                held.pop(int(value) % len(held))  # type: ignore[call-overload]
            await _settle(local, waiting, held, past)
            assert local.model.releases.spilled_bytes <= 2 * BYTES
        while waiting:
            held.clear()
            await asyncio.wait({future for _, future in waiting}, return_when=asyncio.FIRST_COMPLETED)
            await _settle(local, waiting, held, past)
    finally:
        held.clear()
        waiting.clear()
        await local.close()


async def _cut(local: LocalModel, past: list[np.ndarray], rows: np.ndarray, *, deleted: bool) -> None:
    values = np.full((len(rows), TABLE.dim), 0 if deleted else len(past), "<f4")
    shard = Shard.whole(TABLE)
    await local.cut_batches([RowBatch.deletes(shard, rows) if deleted else RowBatch(shard, rows, values)])
    past.append(past[-1].copy())
    past[-1][rows] = values


async def _settle(
    local: LocalModel,
    waiting: list[tuple[int, asyncio.Future[FrozenRelease]]],
    held: list[FrozenRelease],
    past: list[np.ndarray],
) -> None:
    """Take what is done, and see what replicas then hold."""
    for _ in range(3):
        await local.model.on_thread(int)  # What was asked of it before is done.
    for number, future in [each for each in waiting if each[1].done()]:
        waiting.remove((number, future))
        release = future.result()
        held.append(release)
        if release.head is None:
            continue
        rows = past[number].copy()
        for batch in live_rows(release).values():
            rows[batch.ids] = batch.values
        for batch in deleted_rows(release).values():
            rows[batch.ids] = 0
        assert number <= release.head.number
        assert rows.tobytes() == past[release.head.number].tobytes()
