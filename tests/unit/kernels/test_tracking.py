"""Kernels of the tracker: marks and stamps at their edges, copies that follow, and sorted maps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deltasync.kernels import tracking

FREE = 2**63 - 1


def test_ids_and_tables_that_are_not_there_are_left_alone() -> None:
    bits, counts = np.zeros(1, np.uint64), np.zeros((1, 1), np.int64)
    places = np.array([(0, 0, 1, 0, 64)])
    assert tracking.mark_looked_up(np.array([1, 2]), np.array([0, 5]), 1, places, bits, counts) == 2
    assert tracking.mark_looked_up(np.array([3]), np.array([-1, 1]), 1, places, bits, counts) == 1
    assert tracking.mark_looked_up(np.array([4]), np.array([1, 0]), 1, places, bits, counts) == 0
    assert tracking.mark_looked_up(np.array([5]), np.array([], np.int64), 1, places, bits, counts) == 0
    without_rows = np.array([(0, 0, 1, 1, 0)])
    assert tracking.mark_looked_up(np.array([1, 2]), np.array([0, 2]), 1, without_rows, bits, counts) == 0
    assert bits.tolist() == [0b1110]


def test_words_without_a_later_stamp_are_not_looked_at() -> None:
    stamps, newest = np.full(130, 5, np.int32), np.array([0, 5, 0], np.int32)
    ids = np.empty(64, np.int64)
    assert tracking.list_later(stamps, newest, 4, 1, ids) == 64
    assert ids.tolist() == list(range(64, 128))


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        tracking.mark(np.zeros(1, np.uint8), 1, np.zeros(1, np.uint64))


# Copies that follow what they are of, compared with NumPy.

# Whole blocks, the end of one, and rows that are wider than a block.
SHAPES = st.tuples(st.integers(0, 40), st.integers(1, 70)) | st.sampled_from(((3, 1500), (1024, 1), (1025, 2)))
WORDS = st.sampled_from((np.uint8, np.uint16, np.uint32))
NUMBERS = arrays.arrays(np.int64, st.integers(0, 3000), elements=st.integers(-3, 3), fill=st.just(0))


@given(st.data(), SHAPES, WORDS)
def test_rows_that_differ_are_copied(
    data: st.DataObject, shape: tuple[int, int], word: type[np.unsignedinteger]
) -> None:
    rows = np.arange(np.prod(shape)).astype(word).reshape(shape)
    copy = rows.copy()
    for row, column, flip in data.draw(_flips(shape, 8 * rows.itemsize)):
        copy[row, column] ^= word(1 << flip)
    expected = np.flatnonzero((rows != copy).any(axis=1)).tolist()
    ids = np.full(len(rows) + 1, -1)
    count = tracking.follow_rows(rows.reshape(-1), shape[1], copy.reshape(-1), ids)
    assert ids[:count].tolist() == expected
    assert (ids[count:] == -1).all()
    assert np.array_equal(copy, rows)


def _flips(shape: tuple[int, int], bits: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    rows, columns = shape
    if not rows:
        return st.just([])
    flip = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1), st.integers(0, bits - 1))
    return st.lists(flip, max_size=5)


@given(NUMBERS, st.sampled_from([0, FREE]), st.sampled_from([0, -1]), st.lists(st.integers(0, 2999), max_size=5))
def test_numbers_that_differ_are_copied(numbers: np.ndarray, flip: int, none: int, others: list[int]) -> None:
    expected = np.where(numbers == none, 0, numbers ^ flip)
    copy = expected.copy()
    changed = sorted({index for index in others if index < len(numbers)})
    copy[changed] += 1
    ids = np.full(len(numbers) + 1, -1)
    count = tracking.follow_numbers(numbers, flip, none, copy, ids)
    assert ids[:count].tolist() == changed
    assert (ids[count:] == -1).all()
    assert np.array_equal(copy, expected)


# Sorted maps, compared with dictionaries.

ROWS, OFFSET = 6, 10
RAW = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9)
ENTRIES = st.lists(st.tuples(RAW, st.integers(OFFSET - 1, OFFSET + ROWS)), max_size=ROWS)


def read(entries: list[tuple[int, int]], first: int, end: int) -> tuple[int, list[int]]:
    raw, rows = (np.array([entry[side] for entry in entries], np.int64) for side in (0, 1))
    column = np.zeros(ROWS, np.int64)
    return tracking.read_sorted(raw, rows, OFFSET, first, end, column), column.tolist()


@given(st.dictionaries(RAW, st.integers(OFFSET, OFFSET + ROWS - 1), max_size=ROWS), st.integers(-5, 5))
def test_raw_ids_by_row(entries: dict[int, int], first: int) -> None:
    by_row = {row: raw for raw, row in entries.items()}
    named = sorted((raw, row) for row, raw in by_row.items())
    outside, column = read(named, first, 7)
    taken = {raw: row for raw, row in named if raw != FREE}
    assert outside == sum(not first <= raw < 7 for raw in taken)
    rows = {row: raw for raw, row in taken.items()}
    assert column == [rows[OFFSET + row] ^ FREE if OFFSET + row in rows else 0 for row in range(ROWS)]


@given(ENTRIES)
def test_what_is_no_map_is_found(entries: list[tuple[int, int]]) -> None:
    taken = [(raw, row) for raw, row in entries if raw != FREE]
    raw_ids, rows = [raw for raw, _ in taken], [row for _, row in taken]
    sound = (
        raw_ids == sorted(set(raw_ids))
        and len(set(rows)) == len(rows)
        and all(OFFSET <= row < OFFSET + ROWS for row in rows)
    )
    outside, _ = read(entries, -(2**63), 2**63 - 1)
    assert outside == (0 if sound else tracking.UNSOUND)
