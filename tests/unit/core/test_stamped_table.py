from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stamped import stamped_table

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.core import stamped_table as stamped_table_module
from deltasync.core.changes import ChangeCounts
from deltasync.core.digests import RowDigests, checksum, row_digests
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import DamagedRows, Ids, RowBatch, Values
from deltasync.core.stamped_table import Slots, StampedTable, table_bytes
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import VALUE_TYPES, Shard, TableKind, TableSpec


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 4)))
    return TableSpec("t", *shape, dtype=draw(st.sampled_from(VALUE_TYPES)))


def some_ids(table: TableSpec) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, table.rows - 1)).map(sorted)


@given(st.data(), tables())
def test_a_table_is_what_was_written_last(data: st.DataObject, table: TableSpec) -> None:
    stamped = StampedTable(table)
    values = {(row, col): 0.0 for row in range(table.rows) for col in range(table.dim)}
    last = dict.fromkeys(range(table.rows), 0)
    version = 0
    for _ in range(data.draw(st.integers(0, 6))):
        version += data.draw(st.integers(1, 3))
        ids = data.draw(some_ids(table))
        first = data.draw(st.integers(0, table.dim - 1))
        cols = range(first, data.draw(st.integers(first + 1, table.dim)))
        new = np.array([[data.draw(st.integers(-99, 99)) for _ in cols] for _ in ids], table.dtype)
        shard = Shard(table, 0, table.rows, first, len(cols))
        stamped.apply(RowBatch(shard, np.array(ids, np.int64), new.reshape(len(ids), len(cols))), version)
        for number, row in enumerate(ids):
            last[row] = version
            values.update({(row, col): new[number][col - first] for col in cols})

    for since in range(version + 1):
        changed = [row for row in range(table.rows) if last[row] > since]
        found = stamped.changed_since(since)
        assert found.dtype == np.int64
        assert found.tolist() == changed
        assert stamped.counts.after(since) == len(changed)
        out = np.full((len(found), table.dim), 7, table.dtype)
        read = stamped.read(found, out)
        assert (read.ids.tolist(), read.values is out) == (changed, True)
        assert out.tolist() == [[values[row, col] for col in range(table.dim)] for row in changed]


# The scan goes block by block: a block smaller than the table shows what happens at its edges.
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(1, 8))
def test_rows_that_are_there_and_have_another_stamp(numbers: list[int], scan_rows: int) -> None:
    spec = TableSpec("t", len(numbers), 1)
    stamped = stamped_table(spec, np.zeros((spec.rows, 1), np.float32), np.array(numbers))
    with mock.patch.object(stamped_table_module, "_SCAN_ROWS", scan_rows):
        found = stamped.not_stamped(2)
    assert found.tolist() == [row for row, number in enumerate(numbers) if number in (1, 3)]


@given(tables(), st.data())
def test_applying_twice_changes_nothing(table: TableSpec, data: st.DataObject) -> None:
    ids = np.array(data.draw(some_ids(table)), np.int64)
    values = np.ones((len(ids), table.dim), table.dtype)
    once, twice = StampedTable(table), StampedTable(table)
    for stamped, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            stamped.apply(RowBatch.of_table(table, ids, values), 3)
    check_same(once, twice)


def check_same(one: StampedTable, other: StampedTable) -> None:
    """Check that two tables have the same bits, and answer the same."""
    for name in ("rows", "stamps", "digests"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert (one.checksum, one.norm) == (other.checksum, other.norm)
    for number in range(one.counts.newest + 1):
        assert one.counts.after(number) == other.counts.after(number)
        assert one.changed_since(number).tolist() == other.changed_since(number).tolist()


class Elsewhere(StampedTable):
    """Its rows have other ids than the numbers from 0 on."""

    def locate(self, ids: Ids) -> Slots:
        return (ids - 1000) // 3

    def ids_of(self, slots: Slots) -> Ids:
        return 1000 + 3 * slots


@given(st.data(), tables())
def test_only_locate_and_ids_of_know_which_ids_a_table_has(data: st.DataObject, table: TableSpec) -> None:
    plain, moved = StampedTable(table), Elsewhere(table)
    slots, everything = np.arange(table.rows), moved.ids_of(np.arange(table.rows))
    for version in range(1, data.draw(st.integers(1, 5))):
        batch = data.draw(batches(table, whole=False))
        plain.apply(batch, version)
        moved.apply(replace(batch, ids=moved.ids_of(batch.ids)), version)
        for name in ("rows", "stamps", "digests"):
            assert getattr(moved, name).tobytes() == getattr(plain, name).tobytes(), name
        assert moved.checksum == checksum(everything, moved.digests)
        assert moved.not_stamped(version).tolist() == moved.ids_of(plain.not_stamped(version)).tolist()
    assert moved.numbers(everything).tolist() == plain.numbers(slots).tolist()
    assert moved.deleted(everything).tolist() == plain.deleted(slots).tolist()
    assert moved.fits(everything, plain.rows).all()
    for since in range(plain.counts.newest + 1):
        ids = moved.changed_since(since)
        assert ids.tolist() == moved.ids_of(plain.changed_since(since)).tolist()
        assert [each.tolist() for _, each in PreCopy([moved], [since], 0).rest()] == [ids.tolist()] * bool(
            len(ids)
        )
        read = moved.read(ids, np.empty((len(ids), table.dim), table.dtype))
        assert read.values.tobytes() == moved.rows_of(ids).tobytes() == plain.rows_of(moved.locate(ids)).tobytes()
    loaded, gone = Elsewhere(table), moved.deleted(everything) & (moved.stamps != 0)
    live = everything[~gone & (moved.stamps != 0)]
    loaded.load(live, moved.stamps[moved.locate(live)], moved.digests[moved.locate(live)], moved.rows_of(live))
    loaded.load(everything[gone], moved.stamps[gone], moved.digests[gone], None)
    loaded.recount()
    assert (loaded.checksum, loaded.stamps.tobytes()) == (moved.checksum, moved.stamps.tobytes())


class Halved(StampedTable):
    """Replicas hold half of every value, without its fraction."""

    held_as_stored = False

    def held_digests(self, rows: Values) -> RowDigests:
        return row_digests(np.trunc(rows.astype(np.float64) / 2).astype(rows.dtype))


def batches(table: TableSpec, *, whole: bool) -> st.SearchStrategy[RowBatch]:
    """Rows of some columns, or deletes of them; with their digests, or without."""

    @st.composite
    def draw_batch(draw: st.DrawFn) -> RowBatch:
        ids = np.array(draw(some_ids(table)), np.int64)
        first = 0 if whole else draw(st.integers(0, table.dim - 1))
        shard = Shard(table, 0, table.rows, first, table.dim if whole else draw(st.integers(1, table.dim - first)))
        if draw(st.booleans()):
            return RowBatch.deletes(shard, ids)
        elements = draw(
            st.lists(st.integers(-99, 99), min_size=len(ids) * shard.cols, max_size=len(ids) * shard.cols)
        )
        rows = RowBatch(shard, ids, np.array(elements, table.dtype).reshape(len(ids), shard.cols))
        return rows.digested() if not whole and draw(st.booleans()) else rows

    return draw_batch()


# Numbers of 64 bits are two words each.
WIDE = TableSpec("wide", 5, 3, np.dtype("<f8"), TableKind.PARAMETER)
WHOLE_NUMBERS = TableSpec("numbers", 5, 3, np.dtype("<i8"), TableKind.BUFFER)


@given(
    st.data(),
    tables() | st.sampled_from([WIDE, WHOLE_NUMBERS]),
    st.integers(1, 4),
    st.sampled_from([StampedTable, Halved]),
)
def test_checksum_norm_and_digests_are_those_of_all_rows_as_they_are_held(
    data: st.DataObject, table: TableSpec, block_rows: int, kind: type[StampedTable]
) -> None:
    stamped = kind(table)
    everything = np.arange(table.rows)
    with mock.patch.object(stamped_table_module, "BLOCK_ROWS", block_rows):
        for version in range(1, data.draw(st.integers(1, 6))):
            stamped.apply(data.draw(batches(table, whole=kind is Halved)), version)
            assert stamped.fits(everything, stamped.rows).all()
            held = stamped.held_digests(stamped.rows)
            assert stamped.checksum == checksum(everything, held)
            squares = np.square(stamped.rows.astype(np.float64)).sum()
            assert stamped.norm == (np.sqrt(squares) if table is not WHOLE_NUMBERS else 0)
            assert (stamped.digests == held).all()
        kept = stamped.checksum, stamped.norm, stamped.counts.after(0)
        stamped.recount()
    assert (stamped.checksum, stamped.norm, stamped.counts.after(0)) == kept


def flip(data: st.DataObject, stamped: StampedTable) -> int:
    """Flip a bit of a table; in which row."""
    row, column = (data.draw(st.integers(0, size - 1)) for size in stamped.rows.shape)
    bits = stamped.rows.view(f"u{stamped.rows.itemsize}")
    bits[row, column] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    return row


def filled(table: TableSpec) -> StampedTable:
    """A table whose rows differ."""
    stamped, ids = StampedTable(table), np.arange(table.rows)
    rows = np.arange(1, table.rows * table.dim + 1).reshape(-1, table.dim).astype(table.dtype)
    stamped.apply(RowBatch.of_table(table, ids, rows), 1)
    return stamped


@given(st.data(), tables())
def test_a_flipped_bit_is_found_until_the_whole_row_is_overwritten(data: st.DataObject, table: TableSpec) -> None:
    """Also where columns were overwritten, those with the bit among them."""
    stamped, everything = filled(table), np.arange(table.rows)
    row = flip(data, stamped)
    first = data.draw(st.integers(0, table.dim - 1))
    shard = Shard(table, 0, table.rows, first, data.draw(st.integers(1, table.dim - first)))
    if shard.cols < table.dim:
        stamped.apply(RowBatch(shard, everything, np.ones((table.rows, shard.cols), table.dtype)), 2)
    assert np.flatnonzero(~stamped.fits(everything, stamped.rows)).tolist() == [row]
    with pytest.raises(DamagedRows) as damaged:
        stamped.read(everything, np.empty_like(stamped.rows))
    assert (damaged.value.ids.tolist(), damaged.value.table) == ([row], "t")
    stamped.apply(RowBatch.of_table(table, everything, np.ones_like(stamped.rows)), 3)
    assert stamped.checksum == checksum(everything, row_digests(np.ones_like(stamped.rows)))
    np.testing.assert_array_equal(stamped.read(everything, np.empty_like(stamped.rows)).digests, stamped.digests)


@given(st.data(), tables(), st.integers(1, 4))
def test_a_block_that_fails_is_not_half_done(data: st.DataObject, table: TableSpec, fails: int) -> None:
    batch = data.draw(batches(table, whole=False))
    once, again = filled(table), filled(table)
    once.apply(batch, 2)
    moved, calls = ChangeCounts.moved, iter(range(1, 1000))

    def failing(*arguments: Any) -> ChangeCounts:
        if next(calls) == fails:
            raise MemoryError
        return moved(*arguments)

    with (
        mock.patch.object(stamped_table_module, "BLOCK_ROWS", 3),
        mock.patch.object(ChangeCounts, "moved", failing),
    ):
        if len(batch) > 3 * (fails - 1):
            with pytest.raises(MemoryError):
                again.apply(batch, 2)
        again.apply(batch, 2)
    check_same(once, again)


def test_the_norm_is_that_of_all_rows_together_and_never_nan() -> None:
    stamped = StampedTable(TableSpec("t", 3, 2))

    def write(version: int, rows: dict[int, list[float]]) -> None:
        values = np.array(list(rows.values()), np.float32)
        stamped.apply(RowBatch.of_table(stamped.spec, np.array(list(rows)), values), version)

    assert stamped.norm == 0
    write(1, {0: [3.0, 0.0], 2: [0.0, -4.0]})
    assert stamped.norm == 5
    for value in (2.0**50, 1.0):
        write(2, {1: [value, value]})
    assert stamped.norm == np.sqrt(27)  # What a far larger row has made the sum lose is counted anew.
    write(3, {row: [0.0, 0.0] for row in range(3)})
    assert stamped.norm == 0


def test_the_norm_is_right_after_numbers_without_a_square_are_gone() -> None:
    stamped, ids = StampedTable(WIDE), np.arange(5)
    stamped.apply(RowBatch.of_table(WIDE, ids, np.full((5, 3), 1e300)), 1)
    assert np.isfinite(stamped.norm)
    shard = Shard(WIDE, 0, 5, 1, 2)
    stamped.apply(RowBatch(shard, ids, np.full((5, 2), 1.0)), 2)
    stamped.apply(RowBatch.of_table(WIDE, ids, np.full((5, 3), 2.0)), 3)
    assert stamped.norm == np.sqrt(60)


def test_a_norm_is_kept_where_it_is_wanted() -> None:
    for normed, expected in ((None, 10), (True, 10), (False, 0)):
        stamped = StampedTable(TableSpec("t", 4, 1), normed=normed)
        stamped.apply(RowBatch.of_table(stamped.spec, np.arange(4), np.full((4, 1), 5, np.float32)), 1)
        stamped.recount()
        assert stamped.norm == expected


# Loading.


@given(st.data(), tables(), st.integers(1, 9))
def test_a_table_that_is_loaded_is_as_it_was(data: st.DataObject, table: TableSpec, chunk_rows: int) -> None:
    """Rows that changed while others were copied come twice; what came last counts."""
    stamped, loaded = StampedTable(table), StampedTable(table)
    for version in range(1, data.draw(st.integers(2, 6))):
        before = stamped.changed_since(0)
        if data.draw(st.booleans()):
            load(loaded, stamped, before)
        stamped.apply(data.draw(batches(table, whole=False)), version)
    changed = stamped.changed_since(0)
    for start in data.draw(st.permutations(range(0, len(changed), chunk_rows))):
        load(loaded, stamped, changed[start : start + chunk_rows])
    with mock.patch.object(stamped_table_module, "BLOCK_ROWS", 3):
        loaded.recount()
    check_same(loaded, stamped)


def load(into: StampedTable, stamped: StampedTable, ids: Ids) -> None:
    """Load rows as they are into another table, from arrays that begin anywhere."""
    gone = stamped.deleted(ids)
    for some, values in ((ids[gone], None), (ids[~gone], stamped.rows_of(ids[~gone]))):
        numbers, digests = shift(stamped.stamps[some]), shift(stamped.digests[some])
        into.load(shift(some), numbers, digests, None if values is None else shift(values))


def shift(array: Any) -> Any:
    room = np.empty(array.nbytes + 1, np.uint8)
    moved = room[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


SPEC = TableSpec("user", 10, 2)
ZEROS, ONES = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("ids", "numbers", "values", "said"),
    [
        ([1, 10], [1, 1], ONES, "row ids of a checkpoint must ascend within 0 to 9, these go from 1 to 10"),
        ([-1, 3], [1, 1], ONES, "ascend within 0 to 9"),
        ([3, 3], [1, 1], ONES, "ascend within 0 to 9"),
        (
            [1, 3],
            [1, 1 << 62],
            ONES,
            f"row 3 of a checkpoint has the stamp {1 << 62}, which is impossible for a live row",
        ),
        ([1, 3], [1, 0], ONES, "row 3 of a checkpoint has the stamp 0, which is impossible for a live row"),
        ([1, 3], [1, -4], ONES, "row 3 of a checkpoint has the stamp -4, which is impossible for a live row"),
        (
            [1, 3],
            [-(2**63), -1],
            None,
            f"row 1 of a checkpoint has the stamp {-(2**63)}, which is impossible for a deleted row",
        ),
        ([1, 3], [-1, 1], None, "row 3 of a checkpoint has the stamp 1, which is impossible for a deleted row"),
        ([1, 3], [1], ONES, "do not fit together"),
        ([1, 3], [1, 1], ONES[:1], "do not fit together"),
        ([1, 3], [1, 1], ONES.astype(np.float16), "do not fit together"),
    ],
)
def test_rows_that_cannot_be_are_not_loaded(ids: list[int], numbers: list[int], values: Any, said: str) -> None:
    stamped = StampedTable(SPEC)
    with pytest.raises(InvalidInput, match=f"table 'user': .*{said}"):
        stamped.load(np.array(ids), np.array(numbers), np.ones(2, np.uint64), values)
    check_same(stamped, StampedTable(SPEC))


# Growth.


@given(st.data(), tables(), st.integers(0, 20))
def test_a_table_grows_by_zeros_and_keeps_what_was_written_meanwhile(
    data: st.DataObject, table: TableSpec, more: int
) -> None:
    larger = replace(table, rows=table.rows + more)
    grown, plain = StampedTable(table), StampedTable(larger)

    def write(spec: TableSpec, number: int) -> None:
        batch = data.draw(batches(spec, whole=False))
        for each in (grown, plain):
            shard = replace(batch.shard, table=each.spec)
            each.apply(replace(batch, shard=shard), number)

    write(table, 1)
    grow = grown.grown(larger)
    write(table, 2)
    grow()
    assert (grown.spec, grown.nbytes) == (larger, table_bytes(larger))
    check_same(grown, plain)
    write(larger, 3)
    check_same(grown, plain)


def test_a_table_does_not_shrink() -> None:
    stamped = StampedTable(SPEC)
    smaller, larger = stamped.grown(SPEC), stamped.grown(replace(SPEC, rows=12))
    larger()
    with pytest.raises(ValueError, match="'user' has 12 rows and cannot shrink to 10"):
        smaller()
    assert (stamped.spec.rows, stamped.rows.shape) == (12, (12, 2))


class Small(TableMemory):
    """Memory of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes

    def check(self, nbytes: int, what: str) -> None:
        if nbytes > self._nbytes:
            raise StorageFailed(f"no room for {what}")


@pytest.mark.parametrize(
    "make", [lambda: StampedTable(SPEC, Small(239)), lambda: grown(StampedTable(SPEC, Small(240)))]
)
def test_where_there_is_no_room_a_table_is_refused_whole(make: Callable[[], object]) -> None:
    assert table_bytes(SPEC) == 240
    with pytest.raises(StorageFailed, match="no room for table 'user'"):
        make()


def grown(stamped: StampedTable) -> None:
    try:
        stamped.grown(replace(SPEC, rows=11))
    finally:
        assert (stamped.spec, len(stamped.rows)) == (SPEC, 10)
