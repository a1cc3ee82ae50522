"""A cut as it lies in memory against what is read of the tables it was applied to."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.releases import frozen_at

from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.cut_rows import cut_rows

TABLES = [TableSpec("a", 12, 2), TableSpec("b", 6, 3, np.dtype("<f2"))]
SLOTS = {table.name: slot for slot, table in enumerate(TABLES)}
WHOLE = [Shard.whole(table) for table in TABLES]
# The second half of a table, and one of its columns: what ranks may hold beside all of it.
SHARDS = [*WHOLE, Shard(TABLES[0], 6, 6, 0, 2), Shard(TABLES[0], 0, 12, 1, 1)]

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
    tables = [StampedTable.zeros(table) for table in TABLES]
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
        RowBatch(Shard(TABLES[0], row, 1, 0, 2), np.array([row]), np.full((1, 2), row, "<f4")) for row in range(12)
    ]
    found = cut_rows(reversed(cut), SLOTS)
    assert found is not None
    ((slot, rows),) = found
    assert (slot, rows.ids.tolist(), rows.values[:, 0].tolist()) == (0, list(range(12)), list(range(12)))
