"""Releases: what they hold, of a cut or of tables; small ones are shared, large ones copied block by block."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.releases import ChangingTables, deleted_rows, live_rows

from deltasync.base.errors import Superseded
from deltasync.core.rows import DamagedRows, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.model.applied_tables import cut_rows
from deltasync.model.releases import Copying, FrozenRelease, Head, ReleaseChunk, checksums_of, freeze

TABLES = [TableSpec("a", 40, 3), TableSpec("b", 20, 2, np.dtype("<f2")), TableSpec("c", 5, 1)]
A_BYTES = TABLES[0].row_bytes


def content(frozen: FrozenRelease) -> list[tuple[int, list[int], bytes]]:
    return [(slot, rows.ids.tolist(), rows.values.tobytes()) for slot, rows in live_rows(frozen).items()]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4), min_size=1)), max_size=4), st.integers(0, 4)
)
def test_a_release_has_the_rows_stamped_after_a_number(changes: list[tuple[int, set[int]]], after: int) -> None:
    made = ChangingTables(TABLES)
    for slot, ids in changes:
        made.write(slot, sorted(ids))
    frozen = freeze(made.tables, after, None)
    expected = {slot: table.changed_since(after).tolist() for slot, table in enumerate(made.tables)}
    assert [(slot, ids) for slot, ids, _ in content(frozen)] == [each for each in expected.items() if each[1]]
    assert frozen.rows == sum(map(len, expected.values()))
    assert frozen.nbytes == sum(len(ids) * TABLES[slot].row_bytes for slot, ids in expected.items())
    assert frozen.checksums == checksums_of(made.tables)


def test_a_release_does_not_change_with_its_tables() -> None:
    made = ChangingTables(TABLES)
    made.write(0, range(40), 3)
    frozen = freeze(made.tables, 0, None)
    before = content(frozen)
    made.write(0, range(40), 9)
    assert content(frozen) == before


def test_deleted_rows_are_named_to_replicas_that_may_hold_them() -> None:
    made = ChangingTables(TABLES)
    made.write(0, range(9))
    made.delete(0, range(2, 8))
    frozen = freeze(made.tables, 1, None)
    assert deleted_rows(frozen)[0].ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert frozen.nbytes == 6 * 8
    for after, whole in ((0, frozenset[int]()), (1, frozenset({0}))):
        frozen = freeze(made.tables, after, None, whole)
        assert (live_rows(frozen)[0].ids.tolist(), deleted_rows(frozen)) == ([0, 1, 8], {})
        assert frozen.whole == whole


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
    tables = [StampedTable(table) for table in CUT_TABLES]
    for version, some in ((1, before), (2, cut)):
        for batch in some:
            tables[SLOTS[batch.table.name]].apply(batch, version)
    found = cut_rows(cut, SLOTS)
    named = [(batch.table.name, row) for batch in cut for row in batch.ids.tolist()]
    if found is not None:
        assert rows_of(found) == rows_of([(chunk.slot, chunk.rows) for chunk in freeze(tables, 1, None).chunks])
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


# Small releases.


def played(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(bounded())


def test_replicas_that_lack_the_same_rows_share_a_release() -> None:
    made = ChangingTables(TABLES, block_bytes=1)

    async def scenario() -> None:
        made.write(0, range(9))
        made.write(0, [3])
        first = await made.small(1)
        assert await made.small(1) is first
        assert await made.small(0) is not first
        assert await made.small(1, frozenset({0})) is not first
        assert (first.head and first.head.number, live_rows(first)[0].ids.tolist()) == (2, [3])
        kept = weakref.ref(first)
        assert made.releases.room < (1 << 20)
        del first
        gc.collect()
        assert kept() is None

    played(scenario)
    assert made.releases.room == 1 << 20


def test_what_was_made_of_the_rows_of_a_cut_is_kept_until_the_next_one() -> None:
    made = ChangingTables(TABLES, block_bytes=1)

    async def scenario() -> None:
        made.write(0, range(9))
        rows = RowBatch.of_table(TABLES[0], [3], np.ones((1, 3), "<f4"))
        made.change(rows)
        release = made.releases.of_cut([(0, rows)], made.tables, Head(2, 2, 0, 0))
        assert release
        made.releases.have(release, made.head)
        assert await made.small(1) is release
        assert release.checksums == (await made.small(0)).checksums
        kept = weakref.ref(release)
        del release
        gc.collect()
        assert kept()
        made.write(0, [4])
        gc.collect()
        assert kept() is None

    played(scenario)


def test_a_cut_that_there_is_no_memory_for_is_read_from_the_tables() -> None:
    made = ChangingTables(TABLES, memory_bytes=A_BYTES)
    rows = RowBatch.of_table(TABLES[0], [3, 4], np.ones((2, 3), "<f4"))
    head = Head(1, 1, 0, 0)
    assert made.releases.of_cut([(0, rows)], made.tables, head) is None
    assert made.releases.of_cut([(0, rows[:1].digested())], made.tables, head) is None, "digests take memory, too"
    release = made.releases.of_cut([(0, rows[:1])], made.tables, head)
    assert release
    room, size = made.releases.room, len(release.table_rows)
    assert made.releases.room == room - size, "and so do the bytes for all replicas"


def test_nobody_is_given_tables_that_are_not_durable_yet() -> None:
    made = ChangingTables(TABLES, block_bytes=1)

    async def scenario() -> None:
        made.write(0, [1])
        made.open = False
        asked = asyncio.ensure_future(made.get(0))
        await asyncio.sleep(0.01)
        assert not asked.done()
        made.open = True
        made.write(0, [2])
        release = await asked
        assert isinstance(release, FrozenRelease)
        assert (release.head and release.head.number, release.rows) == (2, 2)

    played(scenario)


def test_who_waits_is_told_of_rows_that_do_not_fit_their_digests() -> None:
    made = ChangingTables(TABLES, memory_bytes=A_BYTES, block_bytes=1)

    async def scenario() -> None:
        made.write(0, range(9))
        made.tables[0].rows[0] += 1
        made.write(0, [8])
        with pytest.raises(DamagedRows, match=r"table 'a': .* row 0"):
            await (await made.large(0)).begin().next()
        made.tables[0].rows[8] += 1
        with pytest.raises(DamagedRows, match=r"table 'a': .* row 8"):
            await made.small(1)

    played(scenario)


# Large releases.


class Receiver:
    """A replica that is sent a release, with the rows that it holds before."""

    def __init__(self, made: ChangingTables, after: int) -> None:
        self._rows = [
            np.frombuffer(rows, table.spec.dtype).reshape(table.rows.shape).copy()
            for rows, table in zip(made.past[after], made.tables, strict=True)
        ]
        self._made, self._after = made, after
        self.taken = 0

    def take(self, chunks: Sequence[ReleaseChunk]) -> None:
        for chunk in chunks:
            assert len(chunk.rows)
            self._rows[chunk.slot][chunk.rows.ids] = chunk.rows.values
            self.taken += len(chunk.rows)

    def end(self, release: FrozenRelease) -> None:
        self.take(release.chunks)
        assert release.rows == self.taken
        assert release.head
        assert self._after <= release.head.number
        assert [rows.tobytes() for rows in self._rows] == self._made.past[release.head.number]


ids = st.sets(st.integers(0, 19), min_size=1)
changes = st.tuples(st.sampled_from(["write", "write", "delete"]), ids)
# Which of the replicas that are being sent something takes the next block, or stalls for ever.
events = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 9)),
    changes,
    *[st.tuples(st.just("take"), st.integers(0, 9))] * 5,
    st.tuples(st.just("stall"), st.integers(0, 9)),
)


@given(st.lists(changes, min_size=2, max_size=5), st.lists(events, max_size=40), st.integers(1, 200))
def test_a_large_release_ends_at_the_head_whatever_changes_meanwhile(
    before: list[tuple[str, object]], events: list[tuple[str, object]], block_bytes: int
) -> None:
    made = ChangingTables(TABLES[:2], memory_bytes=300, block_bytes=block_bytes)
    receivers: list[tuple[Receiver, Copying]] = []
    stalled: list[object] = []

    async def play(kind: str, what: object) -> None:
        if kind in ("write", "delete"):
            assert isinstance(what, set)
            change = made.write if kind == "write" else made.delete
            change(made.head % 2, sorted(what))
            return
        assert isinstance(what, int)
        if kind == "ask":
            after = min(what, made.head)
            release = await made.get(after)
            receiver = Receiver(made, after)
            if isinstance(release, FrozenRelease):
                receiver.end(release)
            else:
                receivers.append((receiver, release.begin()))
        elif receivers:
            at = what % len(receivers)
            receiver, copying = receivers[at]
            piece = await copying.next()
            if kind == "stall":
                stalled.append(piece)
                del receivers[at]
            elif isinstance(piece, FrozenRelease):
                receiver.end(piece)
                del receivers[at]
            else:
                receiver.take(piece)

    async def scenario() -> None:
        for kind, what in [*before, *events]:
            await play(kind, what)
        while receivers:  # Once nothing changes any more all get to an end.
            await play("take", 0)

    played(scenario)


def test_a_table_that_is_sent_whole_may_be_large() -> None:
    made = ChangingTables(TABLES[:2], memory_bytes=0, block_bytes=10 * A_BYTES)

    async def scenario() -> None:
        made.write(0, range(40))
        made.write(1, [1])
        copying = (await made.large(2, frozenset({0}))).begin()
        assert isinstance(await copying.next(), list)
        while not isinstance(piece := await copying.next(), FrozenRelease):
            pass
        assert (set(piece.whole), piece.rows) == ({0}, 40)

    played(scenario)


def test_no_more_than_a_block_is_read_at_a_time() -> None:
    """Cuts wait for one, and no longer."""
    made = ChangingTables(TABLES[:1], memory_bytes=30 * A_BYTES, block_bytes=10 * A_BYTES)

    async def scenario() -> None:
        made.write(0, range(40))
        copying, sizes = (await made.large(0)).begin(), list[int]()
        while not isinstance(piece := await copying.next(), FrozenRelease):
            sizes.append(sum(len(chunk.rows) for chunk in piece))
            if len(sizes) == 2:
                made.write(0, range(5))
        assert sizes == [10, 10, 10, 10]
        assert (piece.nbytes, piece.rows) == (5 * A_BYTES, 45)
        assert made.releases.room == 25 * A_BYTES

    played(scenario)


def test_the_rest_is_frozen_if_all_rows_keep_changing_and_memory_allows() -> None:
    made = ChangingTables(TABLES[:1], memory_bytes=10 * A_BYTES, block_bytes=5 * A_BYTES)

    async def taken(copying: Copying, most: int) -> FrozenRelease | None:
        for _ in range(most):
            made.write(0, range(40))
            if isinstance(piece := await copying.next(), FrozenRelease):
                return piece
        return None

    async def scenario() -> None:
        made.write(0, range(40))
        large = await made.large(0)
        first, second = large.begin(), large.begin()
        rest = await taken(first, 20)
        assert rest
        assert rest.nbytes == 40 * A_BYTES
        assert await taken(second, 50) is None
        del rest
        gc.collect()
        assert await taken(second, 20)

    played(scenario)


@pytest.mark.parametrize("change", ["added", "grown"])
def test_no_release_goes_on_with_other_tables(change: str) -> None:
    made = ChangingTables(TABLES[:1], memory_bytes=0, block_bytes=10 * A_BYTES)

    async def scenario() -> None:
        made.write(0, range(40))
        copying = (await made.large(0)).begin()
        await copying.next()
        if change == "added":
            made.tables = [*made.tables, StampedTable(TABLES[1])]
        else:
            made.tables[0].grown(TableSpec("a", 50, 3))()
        with pytest.raises(Superseded, match="the tables changed"):
            await copying.next()

    played(scenario)
