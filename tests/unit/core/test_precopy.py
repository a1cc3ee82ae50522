"""Pre-copy: rows that change while they are copied arrive as they are when the rest is taken."""

from collections.abc import Callable
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core import precopy
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec


def write(table: StampedTable, ids: list[int], number: int, *, deleted: bool = False) -> None:
    if deleted:
        table.apply(RowBatch.deletes(Shard.whole(table.spec), ids), number)
    else:
        values = np.full((len(ids), table.spec.dim), number, table.spec.dtype)
        table.apply(RowBatch.of_table(table.spec, ids, values), number)


class Copies:
    """What a receiver holds that writes every block as it comes: values, and where rows were deleted zeros."""

    def __init__(self, tables: list[StampedTable]) -> None:
        self.tables = tables
        self.rows = [table.rows.copy() for table in tables]
        self.taken = 0

    def take(self, slot: int, ids: Ids) -> None:
        assert len(ids)
        assert (np.diff(ids) > 0).all()
        table = self.tables[slot]
        self.rows[slot][ids] = np.where(table.deleted(ids)[:, None], 0, table.rows_of(ids))
        self.taken += len(ids)

    def take_all(self, copying: PreCopy, nbytes: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        while block := copying.next_block(nbytes):
            self.take(*block)
            meanwhile()

    def end(self, copying: PreCopy) -> None:
        for block in copying.rest():
            self.take(*block)
        for table, rows in zip(self.tables, self.rows, strict=True):
            assert rows.tobytes() == table.rows.tobytes()


@given(st.data())
def test_receivers_hold_the_final_tables_whatever_changes_meanwhile(data: st.DataObject) -> None:
    tables = [StampedTable(TableSpec(name, data.draw(st.integers(1, 40)), 2)) for name in "abc"]
    number = 0

    def change() -> None:
        nonlocal number
        number += 1
        for table in data.draw(st.lists(st.sampled_from(tables), unique=True)):
            ids = sorted(data.draw(st.sets(st.integers(0, table.spec.rows - 1))))
            gone = set(data.draw(st.lists(st.sampled_from(ids)))) if ids else set()
            write(table, [each for each in ids if each not in gone], number)
            write(table, sorted(gone), number, deleted=True)

    for _ in range(data.draw(st.integers(0, 3))):
        change()
    copies, after = Copies(tables), [table.counts.newest for table in tables]
    for _ in range(data.draw(st.integers(0, 3))):
        change()
    with mock.patch.object(precopy, "_WINDOW_ROWS", data.draw(st.integers(1, 50))):
        copying = PreCopy(tables, after, limit=data.draw(st.integers(0, 300)))
        for _ in range(data.draw(st.integers(0, 20))):
            if block := copying.next_block(data.draw(st.integers(1, 200))):
                copies.take(*block)
            if data.draw(st.booleans()):
                change()
        if data.draw(st.booleans()):  # The rest may be taken at any time.
            copies.take_all(copying, nbytes=40)
            copies.take_all(copying, nbytes=40)  # The round before may not have shrunk.
            assert copying.left_bytes <= copying.limit
        copies.end(copying)


def changed_table(rows: int) -> StampedTable:
    table = StampedTable(TableSpec("t", rows, 2))
    write(table, list(range(rows)), 1)
    return table


def test_nothing_is_copied_before_the_rest_where_it_fits_the_limit() -> None:
    table = changed_table(100)
    copying = PreCopy([table], [0], limit=100 * table.spec.row_bytes)
    assert copying.left_bytes == copying.limit
    assert copying.next_block(1) is None
    ((slot, ids),) = copying.rest()
    assert (slot, ids.tolist()) == (0, list(range(100)))
    assert PreCopy([table], [1], limit=0).rest() == []


def test_blocks_are_bounded_and_stop_once_the_rest_is_small() -> None:
    table = changed_table(100)
    row_bytes = table.spec.row_bytes
    copying, sizes = PreCopy([table], [0], limit=35 * row_bytes), list[int]()
    while block := copying.next_block(10 * row_bytes):
        sizes.append(len(block[1]))
    assert sizes == [10] * 7
    assert copying.left_bytes == 30 * row_bytes
    assert [ids.tolist() for _, ids in copying.rest()] == [list(range(70, 100))]


def test_rows_that_changed_before_they_were_reached_are_left_once() -> None:
    table = changed_table(100)
    copying = PreCopy([table], [0], limit=0)
    block = copying.next_block(50 * table.spec.row_bytes)
    assert block
    write(table, [10, 60], 2)
    assert [ids.tolist() for _, ids in copying.rest()] == [[10, *range(50, 100)]]


def test_rows_of_an_unfinished_number_are_copied_in_any_round() -> None:
    table = changed_table(100)
    table.unfinished = 2
    write(table, [60], 2)
    copying, copies = PreCopy([table], [0], limit=0), Copies([table])
    block = copying.next_block(50 * table.spec.row_bytes)
    assert block
    copies.take(*block)
    write(table, [10], 2)
    table.unfinished = 0
    copies.take_all(copying, 50 * table.spec.row_bytes)
    copies.end(copying)


def test_rounds_that_shrink_go_on_until_the_rest_fits() -> None:
    table = changed_table(400)
    row_bytes, number = table.spec.row_bytes, 1
    copying, copies = PreCopy([table], [0], limit=10 * row_bytes), Copies([table])

    def change() -> None:  # One row in four that is copied changes again.
        nonlocal number
        number += 1
        write(table, [(number * 7) % 400, (number * 11) % 400], number)

    copies.take_all(copying, 8 * row_bytes, change)
    assert copying.left_bytes <= copying.limit
    assert 400 <= copies.taken <= 800
    copies.end(copying)


def test_rounds_that_do_not_shrink_end_and_may_go_on() -> None:
    table = changed_table(200)
    row_bytes, number = table.spec.row_bytes, 1
    copying, copies = PreCopy([table], [0], limit=row_bytes), Copies([table])

    def change_all() -> None:
        nonlocal number
        number += 1
        write(table, list(range(200)), number)

    copies.take_all(copying, 50 * row_bytes, change_all)
    assert copying.left_bytes == 200 * row_bytes
    assert copies.taken == 200
    copies.take_all(copying, 50 * row_bytes)  # Nothing changes any more.
    assert copying.left_bytes <= row_bytes
    copies.end(copying)


def test_rows_that_are_added_meanwhile_are_copied() -> None:
    table = changed_table(10)
    copying = PreCopy([table], [0], limit=0)
    copies = Copies([table])
    block = copying.next_block(1 << 20)
    assert block
    copies.take(*block)
    table.grown(TableSpec("t", 20, 2))()
    copies.rows[0] = np.concatenate([copies.rows[0], np.zeros((10, 2), np.float32)])
    write(table, [3, 15], 2)
    copies.take_all(copying, 1 << 20)
    copies.end(copying)
