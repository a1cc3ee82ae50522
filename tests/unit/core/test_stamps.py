from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core import stamps
from deltasync.core.digests import RowDigests, checksum, row_digests
from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import VALUE_TYPES, Shard, TableSpec


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 4)))
    return TableSpec("t", *shape, dtype=draw(st.sampled_from(VALUE_TYPES)))


def some_ids(table: TableSpec) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, table.rows - 1)).map(sorted)


@given(st.data(), tables())
def test_a_table_is_what_was_written_last(data: st.DataObject, table: TableSpec) -> None:
    stamped = StampedTable.zeros(table)
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


def with_stamps(numbers: list[int]) -> StampedTable:
    """A table after a restart."""
    empty = StampedTable.zeros(TableSpec("t", len(numbers), 1))
    return StampedTable(empty.spec, empty.rows, np.array(numbers), empty.digests, empty.squares)


# The scan goes block by block: a block smaller than the table shows what happens at its edges.
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(1, 8))
def test_rows_that_have_another_stamp_or_were_deleted_with_that(numbers: list[int], scan_rows: int) -> None:
    stamped = with_stamps(numbers)
    with mock.patch.object(stamps, "_SCAN_ROWS", scan_rows):
        found = stamped.not_stamped(2)
    assert found.tolist() == [row for row, number in enumerate(numbers) if number in (1, 3, -2)]


@given(tables(), st.data())
def test_applying_twice_changes_nothing(table: TableSpec, data: st.DataObject) -> None:
    ids = np.array(data.draw(some_ids(table)), np.int64)
    values = np.ones((len(ids), table.dim), table.dtype)
    once, twice = StampedTable.zeros(table), StampedTable.zeros(table)
    for stamped, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            stamped.apply(RowBatch.of_table(table, ids, values), 3)
    np.testing.assert_array_equal(once.rows, twice.rows)
    np.testing.assert_array_equal(once.stamps, twice.stamps)


class Halved(StampedTable):
    """Whoever is given its rows holds half of every value, without its fraction."""

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


@given(st.data(), tables(), st.integers(1, 4), st.sampled_from([StampedTable, Halved]))
def test_checksum_norm_and_digests_are_those_of_all_rows_as_they_are_held(
    data: st.DataObject, table: TableSpec, block_rows: int, kind: type[StampedTable]
) -> None:
    stamped = kind.zeros(table)
    everything = np.arange(table.rows)
    with mock.patch.object(stamps, "BLOCK_ROWS", block_rows):
        for version in range(1, data.draw(st.integers(1, 6))):
            stamped.apply(data.draw(batches(table, whole=kind is Halved)), version)
            assert stamped.fits(everything, stamped.rows).all()
            assert not len(stamped.untagged())
            held = stamped.held_digests(stamped.rows)
            assert stamped.checksum == checksum(everything, held)
            squares = np.square(stamped.rows.astype(np.float64)).sum(axis=1)
            assert stamped.norm == np.sqrt(squares.sum())
            assert (stamped.digests.sum(axis=1) == held).all()
        kept = stamped.checksum, stamped.norm
        stamped.count()
        assert (stamped.checksum, stamped.norm) == kept
        stamped.make_digests()
    assert (stamped.checksum, stamped.norm) == kept


@given(st.data(), tables(), st.integers(1, 4))
def test_a_flipped_bit_does_not_fit_after_a_split(data: st.DataObject, table: TableSpec, block_rows: int) -> None:
    rows = np.array(
        data.draw(st.lists(st.integers(-9, 9), min_size=table.rows * table.dim, max_size=table.rows * table.dim))
    )
    stamped, everything = StampedTable.zeros(table), np.arange(table.rows)
    stamped.apply(RowBatch.of_table(table, everything, rows.reshape(-1, table.dim).astype(table.dtype)), 1)
    row, column = (data.draw(st.integers(0, size - 1)) for size in stamped.rows.shape)
    bits = stamped.rows.view(f"u{stamped.rows.itemsize}")
    bits[row, column] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    assert np.flatnonzero(~stamped.fits(everything, stamped.rows)).tolist() == [row]
    with mock.patch.object(stamps, "BLOCK_ROWS", block_rows):
        stamped.split(*data.draw(st.lists(st.integers(0, table.dim))))
    assert np.flatnonzero(~stamped.fits(everything, stamped.rows)).tolist() == [row]


def test_nothing_that_is_overwritten_is_read() -> None:
    """What another process has changed is subtracted as it was."""
    table = TableSpec("t", 4, 6)
    stamped, ids = StampedTable.zeros(table), np.arange(4)
    for first in (0, 2):
        shard = Shard(table, 0, 4, first, 2 + first)
        stamped.apply(RowBatch(shard, ids, np.full((4, shard.cols), 3, "<f4")), 1)
    stamped.rows[1] = 7
    shard = Shard(table, 0, 4, 2, 4)
    stamped.apply(RowBatch(shard, ids, np.full((4, 4), 5, "<f4")), 2)
    expected = np.full((4, 6), 5, "<f4")
    expected[:, :2] = 3
    assert stamped.checksum == checksum(ids, row_digests(expected))
    assert stamped.norm == np.sqrt(4 * (2 * 9 + 4 * 25))


def test_the_norm_is_that_of_all_rows_together_and_never_nan() -> None:
    stamped = StampedTable.zeros(TableSpec("t", 3, 2))

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
