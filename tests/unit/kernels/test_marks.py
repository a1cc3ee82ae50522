"""Marks and stamps, compared with sets of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import marks

ROWS = st.integers(1, 200)
# An id below 0 or beyond the table stands for row 0.
IDS = st.lists(st.integers(-3, 260) | st.sampled_from((-(2**31), 2**31 - 1)), max_size=60)


def words(rows: int) -> int:
    return -(-rows // marks.WORD_ROWS)


def settled(bits: marks.Marks, stamp: int, stamps: marks.Stamps, newest: marks.Stamps) -> list[int]:
    ids = np.full(len(stamps) + 1, -1)
    count = marks.settle(bits, stamp, stamps, newest, ids)
    assert (ids[count:] == -1).all()
    return list(ids[:count].tolist())


@given(ROWS, st.lists(IDS, max_size=4), st.sampled_from((np.int32, np.int64)))
def test_rows_marked_are_stamped_once(rows: int, batches: list[list[int]], dtype: type[np.signedinteger]) -> None:
    bits, newest = np.zeros(words(rows), np.uint64), np.zeros(words(rows), np.int32)
    stamps = np.zeros(rows, np.int32)
    expected = stamps.copy()
    for stamp, batch in enumerate(batches, 1):
        marks.mark(np.array(batch, dtype), rows, bits)
        changed = sorted({row if 0 <= row < rows else 0 for row in batch})
        assert settled(bits, stamp, stamps, newest) == changed
        expected[changed] = stamp
        assert settled(bits, stamp + 1, stamps, newest) == []
    assert stamps.tolist() == expected.tolist()
    found = np.zeros_like(newest)
    marks.find_newest(stamps, found)
    assert newest.tolist() == found.tolist()


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[list[list[int]]]]:
    """Tables of a lookup (rows, first key, end key) in any order, and the ids of each bag of each key."""
    tables, key = list[tuple[int, int, int]](), 0
    for rows, before, keys in draw(st.lists(st.tuples(ROWS, st.integers(0, 1), st.integers(0, 2)), max_size=4)):
        tables.append((rows, key + before, key + before + keys))
        key += before + keys
    key, bags = max(1, key), draw(st.integers(0, 3))
    return draw(st.permutations(tables)), [[draw(IDS) for _ in range(bags)] for _ in range(key)]


@given(lookups(), st.sampled_from((np.int32, np.int64)), st.sampled_from((np.int32, np.int64)), st.booleans())
def test_rows_of_all_tables_of_a_lookup_are_marked(
    lookup: tuple[list[tuple[int, int, int]], list[list[list[int]]]],
    dtype: type[np.signedinteger],
    ends_dtype: type[np.signedinteger],
    by_key: bool,
) -> None:
    tables, ids_by_key = lookup
    first_words = [0, *np.cumsum([words(rows) + 1 for rows, _, _ in tables]).tolist()]  # A word lies between.
    bits = np.zeros(first_words[-1] + 1, np.uint64)
    expected = bits.copy()
    counts = np.arange(2 * len(tables), dtype=np.int64).reshape(2, -1)
    places = [(number, first, end, first_words[number], rows) for number, (rows, first, end) in enumerate(tables)]
    of_key = [[row for bag in key for row in bag] for key in ids_by_key]
    bags = of_key if by_key else [bag for key in ids_by_key for bag in key]
    ends = np.cumsum([0, *map(len, bags)]).astype(ends_dtype)
    of_table = [[row for key in of_key[first:end] for row in key] for _, first, end in tables]
    for (rows, _, _), ids, first_word in zip(tables, of_table, first_words, strict=False):
        marks.mark(np.array(ids, dtype), rows, expected[first_word : first_word + words(rows)])
    numbers = [len(ids) for ids in of_table]
    total = marks.mark_looked_up(
        np.array([row for key in of_key for row in key], dtype),
        ends,
        len(ids_by_key),
        np.array(places, np.int64).reshape(-1, 5),
        bits,
        counts,
    )
    assert bits.tolist() == expected.tolist()
    assert (counts - np.arange(2 * len(tables)).reshape(2, -1)).tolist() == [numbers, numbers]
    assert total == sum(numbers)


def test_ids_that_ends_say_are_not_there_are_not_read() -> None:
    bits, counts = np.zeros(1, np.uint64), np.zeros((1, 1), np.int64)
    places = np.array([(0, 0, 1, 0, 64)])
    assert marks.mark_looked_up(np.array([1, 2]), np.array([0, 5]), 1, places, bits, counts) == 2
    assert marks.mark_looked_up(np.array([3]), np.array([-1, 1]), 1, places, bits, counts) == 1
    assert marks.mark_looked_up(np.array([4]), np.array([1, 0]), 1, places, bits, counts) == 0
    assert marks.mark_looked_up(np.array([5]), np.array([], np.int64), 1, places, bits, counts) == 0
    assert bits.tolist() == [0b1110]


def test_a_table_without_rows_is_left_alone() -> None:
    bits, counts = np.zeros(1, np.uint64), np.zeros((1, 1), np.int64)
    places = np.array([(0, 0, 1, 1, 0)])
    assert marks.mark_looked_up(np.array([1, 2]), np.array([0, 2]), 1, places, bits, counts) == 0
    assert bits.tolist() == [0]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=200), st.integers(-1, 10), st.sampled_from((1, -1)))
def test_later_rows_are_listed(stamps: list[int], cursor: int, sign: int) -> None:
    held = np.array(stamps, np.int32)
    newest = np.full(words(len(held)), -1, np.int32)
    marks.find_newest(held, newest)
    blocks = [stamps[start : start + marks.WORD_ROWS] for start in range(0, len(stamps), marks.WORD_ROWS)]
    assert newest.tolist() == [max(map(abs, block)) for block in blocks]
    ids = np.full(marks.WORD_ROWS * np.count_nonzero(newest > cursor) + 1, -1)
    count = marks.list_later(held, newest, cursor, sign, ids)
    assert ids[:count].tolist() == np.flatnonzero(held * sign > cursor).tolist()
    assert (ids[count:] == -1).all()


def test_words_without_a_later_stamp_are_not_looked_at() -> None:
    stamps, newest = np.full(130, 5, np.int32), np.array([0, 5, 0], np.int32)
    ids = np.empty(64, np.int64)
    assert marks.list_later(stamps, newest, 4, 1, ids) == 64
    assert ids.tolist() == list(range(64, 128))


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        marks.mark(np.zeros(1, np.uint8), 1, np.zeros(1, np.uint64))
