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
