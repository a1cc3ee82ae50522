from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sync_service import stamps
from sync_service.stamps import StampedTable
from sync_service.tables import VALUE_TYPES, Table


@st.composite
def tables(draw: st.DrawFn) -> Table:
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 4)))
    return Table("t", *shape, dtype=draw(st.sampled_from(VALUE_TYPES)))


def some_ids(table: Table) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, table.rows - 1)).map(sorted)


# The scan goes block by block: a block smaller than the table shows what happens at its edges.
@given(st.data(), tables(), st.integers(1, 8))
def test_a_table_is_what_was_written_last(data: st.DataObject, table: Table, scan_rows: int) -> None:
    stamped = StampedTable.zeros(table)
    values = {(row, col): 0.0 for row in range(table.rows) for col in range(table.dim)}
    last = dict.fromkeys(range(table.rows), 0)
    version = 0
    with mock.patch.object(stamps, "_SCAN_ROWS", scan_rows):
        for _ in range(data.draw(st.integers(0, 6))):
            version += data.draw(st.integers(1, 3))
            ids = data.draw(some_ids(table))
            first = data.draw(st.integers(0, table.dim - 1))
            cols = range(first, data.draw(st.integers(first + 1, table.dim)))
            new = np.array([[data.draw(st.integers(-99, 99)) for _ in cols] for _ in ids], table.dtype)
            stamped.apply(np.array(ids, np.int64), new.reshape(len(ids), len(cols)), version, first)
            for number, row in enumerate(ids):
                last[row] = version
                values.update({(row, col): new[number][col - first] for col in cols})

        for since in range(version + 1):
            changed = [row for row in range(table.rows) if last[row] > since]
            found = stamped.changed_since(since)
            assert found.dtype == np.int64
            assert found.tolist() == changed
            assert stamped.count_changed_since(since) == len(changed)
            out = np.full((len(found), table.dim), 7, table.dtype)
            stamped.read(found, out)
            assert out.tolist() == [[values[row, col] for col in range(table.dim)] for row in changed]


@given(tables(), st.data())
def test_applying_twice_changes_nothing(table: Table, data: st.DataObject) -> None:
    ids = np.array(data.draw(some_ids(table)), np.int64)
    values = np.ones((len(ids), table.dim), table.dtype)
    once, twice = StampedTable.zeros(table), StampedTable.zeros(table)
    for stamped, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            stamped.apply(ids, values, 3)
    np.testing.assert_array_equal(once.rows, twice.rows)
    np.testing.assert_array_equal(once.stamps, twice.stamps)
