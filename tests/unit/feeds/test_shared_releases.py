"""Releases that replicas at different numbers share: each holds just what it should, in bounded room."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel
from tests.support.releases import deleted_rows, live_rows

from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds import releases
from deltasync.feeds.frozen_release import FrozenRelease

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
