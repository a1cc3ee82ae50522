"""Tags: what shows whether the stamp and the digest of a row are those that were stored, of this very row."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import RowBatch
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.tags import tag_key, tags_of, wrong_tags

SPEC = TableSpec("t", 50, 3)
KEY = tag_key("rows", SPEC)
_NUMBERS = st.integers(-(1 << 62), 1 << 62)
_DIGESTS = st.integers(0, (1 << 64) - 1)


def tag(row: int, stamp: int, digest: int, key: int = KEY) -> int:
    ids, stamps = np.array([row]), np.array([stamp])
    return int(tags_of(key, ids, stamps, np.array([[digest]], np.uint64))[0])


@given(st.integers(0, 1 << 40), _NUMBERS.filter(bool), _DIGESTS, st.integers(0, 61))
def test_a_bit_of_a_stamp_or_a_digest_changes_it(row: int, stamp: int, digest: int, bit: int) -> None:
    right = tag(row, stamp, digest)
    if stamp ^ (1 << bit):
        assert tag(row, stamp ^ (1 << bit), digest) != right
    assert tag(row, stamp, digest ^ (1 << bit)) != right


def test_it_is_of_the_row_and_of_the_table() -> None:
    """By chance one in 65,536 is another's, too."""
    ids = np.arange(10_000)
    stamps, digests = np.full(10_000, 7), np.full((10_000, 1), 9, np.uint64)
    tags = tags_of(KEY, ids, stamps, digests)
    assert np.count_nonzero(tags == tags_of(KEY, ids[::-1].copy(), stamps, digests)) < 10
    for other in (tag_key("held", SPEC), tag_key("rows", TableSpec("u", 50, 3))):
        assert np.count_nonzero(tags == tags_of(other, ids, stamps, digests)) < 10


def test_a_row_that_never_changed_has_none() -> None:
    assert tag(5, 0, 0) == 0
    assert not len(wrong_tags(KEY, 0, np.zeros(9, np.int64), np.zeros((9, 2), np.uint64), np.zeros(9, np.uint16)))


@pytest.mark.parametrize("stamp", [1, -4, 1 << 40, -(1 << 63), (1 << 63) - 1, 0])
def test_a_row_with_another_stamp_is_taken_for_changed_with_the_newest_number(stamp: int) -> None:
    table = StampedTable.zeros(SPEC)
    for number in (1, 2, 3):
        table.apply(RowBatch.of_table(SPEC, np.array([number, 20]), np.ones((2, 3), np.float32)), number)
    table.stamps[2] = stamp if stamp != 2 else 1
    opened = StampedTable(SPEC, table.rows, table.stamps, table.digests, table.squares, table.columns, table.tags)
    opened.retag_all(3)
    assert opened.stamps[:4].tolist() == [0, 1, 3, 3]
    assert opened.changed_since(2).tolist() == [2, 3, 20]
    assert opened.counts.after(2) == 3
    assert (opened.counts.newest, len(opened.untagged())) == (3, 0)
    assert [ids.tolist() for ids in opened.restamped] == [[2]]


def test_a_row_of_zeros_with_another_stamp_stays_deleted_unless_its_stamp_cannot_be_one() -> None:
    table = StampedTable.zeros(SPEC)
    table.apply(RowBatch.of_table(SPEC, np.arange(9), np.ones((9, 3), np.float32)), 4)
    table.apply(RowBatch.deletes(Shard.whole(SPEC), np.array([2, 3])), 5)
    table.stamps[2], table.stamps[3] = -1, -(1 << 40)
    table.retag_all(6)
    assert table.stamps[[2, 3]].tolist() == [-6, 6]


# Every byte that is kept of a small table changes: what is then given of it is right, or named as damaged.

SMALL = TableSpec("t", 9, 4)
NEWEST, DELETED, ZEROS, NEVER = 300, [3, 4], 5, 8
MASKS = [1, 1 << 7, 255]
ARRAYS = ["rows", "stamps", "tags", "digests"]


def made(halves: bool) -> StampedTable:
    """Rows of several versions: two are deleted, one is of zeros, and one never changed."""
    table = StampedTable.zeros(SMALL)
    ids, values = np.arange(NEVER), np.random.default_rng(0).normal(size=(NEVER, 4)).astype(np.float32)
    values[ZEROS] = 0
    if halves:
        for first in (0, 2):
            some = np.ascontiguousarray(values[:, first : first + 2])
            table.apply(RowBatch(Shard(SMALL, 0, SMALL.rows, first, 2), ids, some), 2)
    else:
        table.apply(RowBatch.of_table(SMALL, ids, values), 2)
    table.apply(RowBatch.deletes(Shard.whole(SMALL), np.array(DELETED[:1])), 5)
    table.apply(RowBatch.deletes(Shard.whole(SMALL), np.array(DELETED[1:])), NEWEST - 1)
    table.apply(RowBatch.of_table(SMALL, np.array([1, 6]), values[[1, 6]] + 1), NEWEST)
    return table


def started(table: StampedTable) -> StampedTable:
    """The table as a service has it that finds these arrays in files."""
    opened = StampedTable(SMALL, table.rows, table.stamps, table.digests, table.squares, table.columns, table.tags)
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
