from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core import stamps
from deltasync.core.digests import Digest, digest
from deltasync.core.rows import Ids, RowBatch, Values
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


# The scan goes block by block: a block smaller than the table shows what happens at its edges.
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(1, 8))
def test_rows_that_have_another_stamp(numbers: list[int], scan_rows: int) -> None:
    table = TableSpec("t", len(numbers), 1)
    stamped = StampedTable(table, np.zeros((table.rows, 1), np.float32), np.array(numbers))
    with mock.patch.object(stamps, "_SCAN_ROWS", scan_rows):
        found = stamped.not_stamped(2)
    assert found.tolist() == [row for row, number in enumerate(numbers) if number in (1, 3)]


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=20))
def test_deleted_rows_have_changed_also_to_who_counts_them_after_a_restart(numbers: list[int]) -> None:
    table = TableSpec("t", len(numbers), 1)
    stamped = StampedTable(table, np.zeros((table.rows, 1), np.float32), np.array(numbers))
    newest = max(map(abs, numbers))
    for since in {0, *range(max(0, newest - 64), newest + 1)}:
        changed = [row for row, number in enumerate(numbers) if abs(number) > since]
        assert stamped.counts.after(since) == len(changed)
        assert stamped.changed_since(since).tolist() == changed


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

    def digest_of(self, ids: Ids, rows: Values, col_offset: int = 0) -> Digest:
        return digest(ids, np.trunc(rows.astype(np.float64) / 2).astype(rows.dtype), col_offset)


def digest_of_what_is_held(stamped: StampedTable) -> Digest:
    return stamped.digest_of(np.arange(stamped.spec.rows), stamped.rows)


@given(st.data(), tables(), st.integers(1, 4), st.sampled_from([StampedTable, Halved]))
def test_the_digest_kept_is_that_of_all_rows_as_they_are_held(
    data: st.DataObject, table: TableSpec, block_rows: int, kind: type[StampedTable]
) -> None:
    stamped = kind.zeros(table)
    with mock.patch.object(stamps, "BLOCK_ROWS", block_rows):
        for version in range(1, data.draw(st.integers(1, 6))):
            ids = data.draw(some_ids(table))
            first = data.draw(st.integers(0, table.dim - 1))
            cols = data.draw(st.integers(1, table.dim - first))
            new = data.draw(st.lists(st.integers(-99, 99), min_size=len(ids) * cols, max_size=len(ids) * cols))
            values = np.array(new, table.dtype).reshape(len(ids), cols)
            shard = Shard(table, 0, table.rows, first, cols)
            stamped.apply(RowBatch(shard, np.array(ids, np.int64), values), version)
            assert stamped.digest == digest_of_what_is_held(stamped)
        kept = stamped.digest
        stamped.count_digest()
    assert stamped.digest == kept


@given(tables(), st.data())
def test_the_digest_counted_after_a_restart_is_the_one_that_was_kept(
    table: TableSpec, data: st.DataObject
) -> None:
    before = StampedTable.zeros(table)
    ids = np.array(data.draw(some_ids(table)), np.int64)
    before.apply(RowBatch.of_table(table, ids, np.full((len(ids), table.dim), 3, table.dtype)), 7)
    after = StampedTable(table, before.rows, before.stamps)
    assert after.digest == Digest()
    after.count_digest()
    assert after.digest == before.digest


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
