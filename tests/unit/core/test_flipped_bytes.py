"""Every byte that is kept of a small table changes: what is then given of it is right, or named as damaged."""

from collections.abc import Iterator

import numpy as np
import pytest

from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec

SPEC = TableSpec("t", 9, 4)
NEWEST, DELETED, ZEROS, NEVER = 300, [3, 4], 5, 8
MASKS = [1, 1 << 7, 255]
ARRAYS = ["rows", "stamps", "tags", "digests"]


def made(halves: bool) -> StampedTable:
    """Rows of several versions: two are deleted, one is of zeros, and one never changed."""
    table = StampedTable.zeros(SPEC)
    ids, values = np.arange(NEVER), np.random.default_rng(0).normal(size=(NEVER, 4)).astype(np.float32)
    values[ZEROS] = 0
    if halves:
        for first in (0, 2):
            some = np.ascontiguousarray(values[:, first : first + 2])
            table.apply(RowBatch(Shard(SPEC, 0, SPEC.rows, first, 2), ids, some), 2)
    else:
        table.apply(RowBatch.of_table(SPEC, ids, values), 2)
    table.apply(RowBatch.deletes(Shard.whole(SPEC), np.array(DELETED[:1])), 5)
    table.apply(RowBatch.deletes(Shard.whole(SPEC), np.array(DELETED[1:])), NEWEST - 1)
    table.apply(RowBatch.of_table(SPEC, np.array([1, 6]), values[[1, 6]] + 1), NEWEST)
    return table


def started(table: StampedTable) -> StampedTable:
    """The table as a service has it that finds these arrays in files."""
    opened = StampedTable(SPEC, table.rows, table.stamps, table.digests, table.squares, table.columns, table.tags)
    opened.retag_all(NEWEST)
    opened.forget_after(NEWEST)
    return opened


def changed(name: str, halves: bool) -> Iterator[tuple[StampedTable, str]]:
    """The table with one byte of an array changed in each way, after a start."""
    for byte in range(getattr(made(halves), name).nbytes):
        for mask in MASKS:
            table = made(halves)
            getattr(table, name).view(np.uint8).reshape(-1)[byte] ^= mask
            yield started(table), f"byte {byte} ^ {mask}"


@pytest.mark.parametrize("halves", [False, True], ids=["whole rows", "halves of rows"])
@pytest.mark.parametrize("name", ARRAYS)
def test_whatever_byte_changes_each_row_is_right_or_named_and_none_is_lost(name: str, halves: bool) -> None:
    right, named = made(halves), 0
    for table, what in changed(name, halves):
        ids = table.changed_since(0)
        damaged = table.damaged(ids)
        sound = np.setdiff1d(ids, damaged)
        assert table.rows[sound].tobytes() == right.rows[sound].tobytes(), what
        assert table.deleted(sound).tolist() == right.deleted(sound).tolist(), what
        assert not len(table.untagged()), what
        for number in (0, 2, 5, NEWEST - 1):
            assert set(right.changed_since(number)) <= set(table.changed_since(number)), what
        extra = np.concatenate([damaged[:0], *table.restamped])
        assert set(table.changed_since(NEWEST - 1)) - set(extra) == {1, 6} - set(extra), what
        assert table.checksum == right.checksum, what
        named += bool(len(damaged) or len(extra))
    assert named or name == "digests", "no change was noticed"
