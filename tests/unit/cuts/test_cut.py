"""What a cut takes, lacks and refuses, and when a row's norm explodes."""

import itertools
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.local_model import LocalModel
from tests.support.wire import publish_open

from deltasync.base.errors import Contradiction, InvalidInput, ResyncRequired
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.cuts.admission import Run
from deltasync.cuts.cut import Cut, PartEnd, RankPart
from deltasync.cuts.messages import check_open
from deltasync.cuts.norm_guard import NormGuard, NormLimit

TABLE = TableSpec("user", 12, 4)
TOP, BOTTOM = Shard(TABLE, 0, 6, 0, 4), Shard(TABLE, 6, 6, 0, 4)


def cut_of(world_size: int) -> Cut:
    """Of a run whose tables were published before."""
    return Cut(3, 10, Run("r", 1, world_size), {"user": 12, "item": 3})


def add(cut: Cut, part: RankPart, slot: int, ids: Ids) -> None:
    shard = part.shards[slot]
    cut.add(part, slot, RowBatch(shard, ids, np.ones((len(ids), shard.cols), shard.table.dtype)), 1)


def fill(cut: Cut, part: RankPart) -> None:
    for slot, shard in enumerate(part.shards):
        add(cut, part, slot, np.arange(shard.row_offset, shard.row_offset + shard.rows))


def test_a_seal_has_the_sizes_of_all_parts_and_the_last_end_of_the_step() -> None:
    cut = cut_of(2)
    top, bottom = (cut.begin(rank, [shard], must_be_full=False) for rank, shard in enumerate((TOP, BOTTOM)))
    add(cut, top, 0, np.array([1, 4]))
    cut.close(top, PartEnd(10, 2, step_end_unix_ns=50))
    cut.close(bottom, PartEnd(10, 0, step_end_unix_ns=90))
    seal = cut.seal(None, (), 100)
    assert (seal.rows, seal.bytes, seal.step_end_unix_ns) == (2, 2 * (8 + 16), 90)


@pytest.mark.parametrize(("times", "newest"), [((5, 7), 7), ((7, None), 7), ((None, None), None)])
def test_a_cut_has_the_newest_event_time_of_its_ranks(times: tuple[int | None, ...], newest: int | None) -> None:
    cut = cut_of(len(times))
    for rank, time in enumerate(times):
        begun = cut.begin(rank, [TOP], must_be_full=False)
        cut.close(begun, PartEnd(10, 0, event_time_unix_ns=time))
    assert cut.seal(None, (), 1).event_time_unix_ns == newest


@pytest.mark.parametrize(("ids", "sent"), [([], 0), ([2], 0), ([3, 4], 2), ([0, 3, 5], 2)])
def test_a_part_lacks_nothing_that_was_never_published(ids: list[int], sent: int) -> None:
    """Three of its six rows were, whether it names them or not."""
    cut = Cut(3, 10, Run("r", 1, 1), {"user": 3})
    part = cut.begin(0, [TOP], must_be_full=False)
    if ids:
        add(cut, part, 0, np.array(ids))
    with pytest.raises(ResyncRequired, match=f"rank 0 sent {sent} of its 3 rows of table 'user' that were never"):
        cut.close(part, PartEnd(10, len(ids), step_end_unix_ns=1))
    whole = cut.begin(0, [TOP], must_be_full=False)
    add(cut, whole, 0, np.array([1, 3, 4, 5]))
    cut.close(whole, PartEnd(10, 4, step_end_unix_ns=1))
    assert whole.end


def test_rows_are_applied_in_the_order_of_the_log() -> None:
    """A row may be in the shards of two ranks: after a restart, the same one of the two stays."""
    cut = cut_of(3)
    for rank in (2, 0, 1):
        part = cut.begin(rank, [TOP], must_be_full=False)
        cut.add(part, 0, RowBatch(TOP, np.array([3]), np.full((1, 4), rank, np.float32)), 1)
    assert [int(rows.values[0, 0]) for rows in cut.rows_in_memory() or ()] == [0, 1, 2]


def test_a_part_begun_anew_forgets_what_came_before() -> None:
    cut = cut_of(1)
    fill(cut, cut.begin(0, [TOP], must_be_full=False))
    again = cut.begin(0, [TOP], must_be_full=False)
    assert (cut.rows, cut.bytes, cut.log_bytes) == (0, 0, 0)
    add(cut, again, 0, np.array([0]))
    cut.close(again, PartEnd(10, 1, step_end_unix_ns=1))
    assert (cut.rows, cut.bytes, cut.log_bytes) == (1, 8 + 16, 1)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_wrong_count_of_rows_is_refused(rows: int) -> None:
    cut = cut_of(1)
    part = cut.begin(0, [TOP], must_be_full=False)
    add(cut, part, 0, np.array([1, 4]))
    with pytest.raises(InvalidInput, match=f"rank 0 closed a part of {rows} rows?, but 2 arrived"):
        cut.close(part, PartEnd(10, rows, step_end_unix_ns=1))
    assert part.end is None


@pytest.mark.parametrize("kind", [TableKind.PARAMETER, TableKind.BUFFER])
def test_a_full_part_that_lacks_rows_of_what_is_always_whole_is_refused(kind: TableKind) -> None:
    cut = cut_of(1)
    part = cut.begin(0, [Shard.whole(TableSpec("top", 12, 4, kind=kind))], must_be_full=False)
    add(cut, part, 0, np.arange(6))
    with pytest.raises(InvalidInput, match=f"full part with 6 rows of {kind.value} 'top', but its shard has 12"):
        cut.close(part, PartEnd(10, 6, full=True, step_end_unix_ns=1))


def test_rows_of_embeddings_that_full_parts_do_not_name_are_to_go() -> None:
    cut, item = cut_of(2), TableSpec("item", 3, 1)
    cut.announce([TABLE, item])
    top, bottom = (cut.begin(rank, [shard], must_be_full=False) for rank, shard in enumerate((TOP, BOTTOM)))
    add(cut, top, 0, np.arange(3))
    cut.close(top, PartEnd(10, 3, full=True, step_end_unix_ns=1))
    cut.close(bottom, PartEnd(10, 0, step_end_unix_ns=1))
    assert not cut.whole()
    bottom = cut.begin(1, [BOTTOM], must_be_full=False)
    cut.close(bottom, PartEnd(10, 0, full=True, step_end_unix_ns=1))
    assert cut.whole() == ("user",)  # Nobody has shards of the other one.


def test_a_part_has_each_row_once_live_and_deletes_by_themselves() -> None:
    cut = cut_of(1)
    part = cut.begin(0, [TOP], must_be_full=False)
    add(cut, part, 0, np.array([3, 5]))
    cut.add(part, 0, RowBatch.deletes(TOP, np.array([1, 4])), 1)
    assert (part.rows, part.bytes) == (4, 2 * (8 + 16) + 2 * 8)
    with pytest.raises(InvalidInput, match="'user': row id 4 came after 4"):
        cut.add(part, 0, RowBatch.deletes(TOP, np.array([4])), 1)


@pytest.mark.parametrize("ids", [[5], [4], [0, 6]])
def test_a_row_that_came_before_is_refused(ids: list[int]) -> None:
    """Else a full part could hold one row twice and another never."""
    cut = cut_of(1)
    part = cut.begin(0, [TOP, BOTTOM], must_be_full=True)
    add(cut, part, 0, np.array([3, 5]))
    add(cut, part, 1, np.array([6]))  # Another shard counts by itself.
    with pytest.raises(InvalidInput, match=f"'user': row id {ids[0]} came after 5"):
        add(cut, part, 0, np.array(ids))
    assert part.rows == 3


@st.composite
def shard_of_table(draw: st.DrawFn) -> Shard:
    first_row, first_col = draw(st.integers(0, 11)), draw(st.integers(0, 3))
    return Shard(
        TABLE, first_row, draw(st.integers(0, 12 - first_row)), first_col, draw(st.integers(1, 4 - first_col))
    )


@given(st.lists(shard_of_table(), max_size=6))
def test_coverage_is_what_painting_the_shards_leaves_blank(shards: list[Shard]) -> None:
    other = Shard.whole(TableSpec("item", 12, 4))
    cut = cut_of(len(shards) + 1)
    painted = np.zeros((12, 4), bool)
    cut.announce([TABLE, other.table])
    for rank, shard in enumerate([other, *shards]):
        cut.begin(rank, [shard], must_be_full=True)
    for shard in shards:
        for row, col in itertools.product(range(shard.rows), range(shard.cols)):
            painted[shard.row_offset + row, shard.col_offset + col] = True
    if painted.all():
        cut.check_coverage()
    else:
        row, col = np.argwhere(~painted)[0]
        with pytest.raises(Contradiction, match=rf"table 'user': rows {row} to \d+, columns {col} to ") as raised:
            cut.check_coverage()
        end_row, end_col = map(int, re.findall(r" to (\d+)", str(raised.value)))
        assert not painted[row : end_row + 1, col : end_col + 1].any()


@pytest.mark.parametrize("rows", [0, 1])
def test_coverage_of_many_uneven_shards_takes_little_memory(rows: int) -> None:
    table = TableSpec("user", 4002, 4002)
    cut = cut_of(1)
    cut.announce([table])
    cut.begin(0, [Shard(table, n, rows, n, 1 + n) for n in range(2000)], must_be_full=True)
    tracemalloc.start()
    try:
        with pytest.raises(Contradiction, match="'user': rows 0 to"):
            cut.check_coverage()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # 16 MB, with a byte for each pair.
    finally:
        tracemalloc.stop()


def test_a_table_that_one_rank_announces_is_the_whole_cuts() -> None:
    cut = cut_of(2)
    for rank, tables in enumerate(([TABLE], [TABLE, TableSpec("bias", 1, 1)])):
        cut.announce(tables)
        cut.begin(rank, [TOP, BOTTOM], must_be_full=True)
    with pytest.raises(Contradiction, match="table 'bias': rows 0 to 0"):
        cut.check_coverage()


@pytest.mark.parametrize("kept_bytes", [0, 80, 10**6])
def test_rows_are_kept_in_memory_unless_there_are_many(kept_bytes: int) -> None:
    """All of the cut's rows or none, and only those of a part's last try. A row with its digest takes 32 bytes."""
    cut = cut_of(2)
    cut.kept_bytes = kept_bytes

    def send(part: RankPart, *ids: int) -> None:
        for row in ids:
            add(cut, part, 0, np.array([row]))

    send(cut.begin(0, [TOP], must_be_full=False), 0, 1)
    send(cut.begin(1, [BOTTOM], must_be_full=False), 6)
    send(cut.begin(0, [TOP], must_be_full=False), 2)
    rows = cut.rows_in_memory()
    if kept_bytes == 10**6:
        assert rows is not None
        assert sorted(int(batch.ids[0]) for batch in rows) == [2, 6]
    else:
        assert rows is None


@pytest.mark.parametrize("kind", [TableKind.EMBEDDING, TableKind.PARAMETER])
def test_a_map_is_of_a_table_that_is_sharded_or_not(kind: TableKind) -> None:
    rows = replace(TABLE, kind=kind)
    ids = TableSpec("raw_ids", rows.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, rows.name)
    assert check_open(publish_open(tables=[rows, ids], shards=[]).open).tables == [rows, ids]


NORMED = TableSpec("t", 10, 2)


def rows(values: list[float], kind: TableKind = TableKind.EMBEDDING, dtype: str = "<f4") -> RowBatch:
    table = TableSpec("t", 10, 2, np.dtype(dtype), kind)
    array = np.repeat(np.array(values, dtype)[:, None], 2, axis=1)
    return RowBatch(Shard.whole(table), np.arange(len(values)), array)


def refuses(guard: NormGuard, batch: RowBatch) -> bool:
    norms = guard.look(batch)
    return norms is not None and bool(norms.excess)


@given(st.lists(st.lists(st.floats(0, 1000, width=16), min_size=1, max_size=5), min_size=1, max_size=6))
def test_rows_are_compared_with_the_largest_of_all_cuts_before(cuts: list[list[float]]) -> None:
    guard, largest = NormGuard(NormLimit(4.0)), 0.0
    for values in cuts:
        found = guard.look(rows(values))
        assert found
        norm = max(values) * 2**0.5
        assert found.largest == pytest.approx(norm, rel=1e-5)
        if abs(norm - 4 * largest) > 1e-3 * norm:
            assert bool(found.excess) is (largest > 0 and norm > 4 * largest)
        guard.note({"t": found.largest})
        largest = max(largest, norm)


def test_half_floats_deletes_and_buffers() -> None:
    guard = NormGuard(NormLimit(2.0))
    guard.note({"t": 1.0})
    assert refuses(guard, rows([60000.0], dtype="<f2"))
    assert not refuses(guard, rows([60000.0], TableKind.BUFFER))
    assert not refuses(guard, RowBatch.deletes(Shard.whole(NORMED), np.arange(3)))
    assert not refuses(NormGuard(None), rows([1e30]))
    guard.forget("t")
    assert not refuses(guard, rows([60000.0]))


async def test_after_a_restart_rows_are_compared_with_the_largest_of_their_table(tmp_path: Path) -> None:
    """Wherever it is: large tables are looked at in several turns."""
    wide, narrow, buffer = (
        TableSpec("wide", 20, 2, np.dtype("<f2")),
        TableSpec("narrow", 5 << 20, 1),
        TableSpec("buffer", 3, 2, kind=TableKind.BUFFER),
    )
    values = {
        wide: np.array([[3.0, 4.0]], "<f2"),
        narrow: np.array([[-6.0]], "<f4"),
        buffer: np.ones((1, 2), "<f4"),
    }
    local = await LocalModel.opened(tmp_path)
    try:
        await local.add(*values)
        await local.cut({table.name: {table.rows - 1: row} for table, (row,) in values.items()})
        guard = NormGuard(NormLimit(2.0))
        await guard.learn(local.model, values)
        for table, (row,) in values.items():
            for factor, excess in ((2.0, False), (2.1, table is not buffer)):
                batch = RowBatch(Shard.whole(table), np.array([0]), row[None] * row.dtype.type(factor))
                assert refuses(guard, batch) is excess, table.name
    finally:
        await local.close()
