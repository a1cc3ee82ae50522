"""Tags: what shows whether the stamp and the digest of a row are those that were stored, of this very row."""

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


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 49), min_size=1)), max_size=6))
def test_whatever_is_done_to_a_table_its_tags_fit(calls: list[tuple[int, set[int]]]) -> None:
    table = StampedTable.zeros(SPEC)
    for number, (call, rows) in enumerate(calls, start=1):
        ids = np.array(sorted(rows))
        values = np.full((len(ids), 3), number, np.float32)
        if call == 0:
            table.apply(RowBatch.of_table(SPEC, ids, values), number)
        elif call == 1:
            table.apply(RowBatch.deletes(Shard.whole(SPEC), ids), number)
        elif call == 2:
            table.apply(RowBatch(Shard(SPEC, 0, 50, 1, 2), ids, values[:, :2]), number)
        else:
            table.restamp(ids, np.full(len(ids), number))
        assert not len(table.untagged())


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
