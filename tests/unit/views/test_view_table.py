"""Looking at what is dirty in one table of a view."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.mapping import new_view_table, reopened

from deltasync.core.delivery import Delivery
from deltasync.core.mode import Mode
from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.threads import not_shared_yet
from deltasync.core.value_types import ValueType
from deltasync.views.table import ViewTable

TABLE = TableSpec("t", 40, 16)
LOSSY = [ValueType.FP16, ValueType.BF16, ValueType.INT8]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """There is no model here whose thread would have to be used."""
    with not_shared_yet():
        yield


@pytest.fixture
def source() -> StampedTable:
    table = StampedTable.zeros(TABLE)
    table.apply(
        RowBatch.of_table(TABLE, np.arange(40), np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)),
        1,
    )
    return table


def viewed(source: StampedTable, kind: ValueType, folder: Path) -> ViewTable:
    table = new_view_table(source, Delivery(TABLE, kind, Mode.EMBEDDINGS), folder)
    table.copy(np.arange(40), 1)
    return table


@pytest.mark.parametrize("kind", ValueType)
def test_a_row_that_was_left_is_as_far_off_as_before_also_after_a_restart(
    source: StampedTable, kind: ValueType, tmp_path: Path
) -> None:
    table = viewed(source, kind, tmp_path)
    source.apply(RowBatch.of_table(TABLE, np.array([3, 9]), np.full((2, 16), 5, np.float32)), 2)
    dirty = table.find_dirty(1)
    source.apply(RowBatch.of_table(TABLE, np.array([20]), np.full((1, 16), 7, np.float32)), 3)
    more = table.find_dirty(2)
    assert (dirty.ids.tolist(), more.ids.tolist()) == ([3, 9], [3, 9, 20])
    assert more.norms[:2].tolist() == dirty.norms.tolist()
    table.flush()
    table.flush()
    restarted = reopened(table)
    assert restarted.find_dirty(3).norms.tolist() == more.norms.tolist()


@pytest.mark.parametrize("kind", LOSSY)
def test_a_row_that_is_encoded_as_what_replicas_hold_is_not_dirty(
    source: StampedTable, kind: ValueType, tmp_path: Path
) -> None:
    table = viewed(source, kind, tmp_path)
    # The largest and smallest number stay, so that int8 keeps its scale; the others move by less than is sent.
    moved = source.rows_of(np.array([5, 6])).astype(np.float32)
    order = np.argsort(moved, axis=1)[:, 1:-1]
    np.put_along_axis(moved, order, np.take_along_axis(moved, order, 1) * np.float32(1 + 1e-7), 1)
    source.apply(RowBatch.of_table(TABLE, np.array([5, 6]), moved), 2)
    assert table.find_dirty(1).ids.tolist() == []


@pytest.mark.parametrize("kind", ValueType)
def test_a_delete_differs_from_zeros_to_who_has_the_row_and_to_nobody_else(
    source: StampedTable, kind: ValueType, tmp_path: Path
) -> None:
    zeros = RowBatch.of_table(TABLE, np.array([3]), np.zeros((1, 16), np.float32))
    source.apply(zeros, 1)
    for name in ("all", "one"):
        (tmp_path / name).mkdir()
    table = viewed(source, kind, tmp_path / "all")
    one = new_view_table(source, table.delivery, tmp_path / "one")
    one.copy(np.array([9]), 1)
    source.apply(RowBatch.deletes(Shard.whole(TABLE), np.array([3, 9])), 2)
    assert (table.find_dirty(1).ids.tolist(), one.find_dirty(1).ids.tolist()) == ([3, 9], [9])
    table.write(table.deletes(np.array([3, 9])), 2)
    table.settle(np.array([3, 9]))
    assert table.find_dirty(2).ids.tolist() == []
    source.apply(zeros, 3)
    assert table.find_dirty(2).ids.tolist() == [3]
    table.flush()
    restarted = reopened(table)
    assert restarted.find_dirty(2).ids.tolist() == [3]
