"""Marks and stamps at their edges: tests/unit/trainer/tracking compares all others with sets of rows."""

import numpy as np
import pytest

from deltasync.kernels import marks


def test_ids_and_tables_that_are_not_there_are_left_alone() -> None:
    bits, counts = np.zeros(1, np.uint64), np.zeros((1, 1), np.int64)
    places = np.array([(0, 0, 1, 0, 64)])
    assert marks.mark_looked_up(np.array([1, 2]), np.array([0, 5]), 1, places, bits, counts) == 2
    assert marks.mark_looked_up(np.array([3]), np.array([-1, 1]), 1, places, bits, counts) == 1
    assert marks.mark_looked_up(np.array([4]), np.array([1, 0]), 1, places, bits, counts) == 0
    assert marks.mark_looked_up(np.array([5]), np.array([], np.int64), 1, places, bits, counts) == 0
    without_rows = np.array([(0, 0, 1, 1, 0)])
    assert marks.mark_looked_up(np.array([1, 2]), np.array([0, 2]), 1, without_rows, bits, counts) == 0
    assert bits.tolist() == [0b1110]


def test_words_without_a_later_stamp_are_not_looked_at() -> None:
    stamps, newest = np.full(130, 5, np.int32), np.array([0, 5, 0], np.int32)
    ids = np.empty(64, np.int64)
    assert marks.list_later(stamps, newest, 4, 1, ids) == 64
    assert ids.tolist() == list(range(64, 128))


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        marks.mark(np.zeros(1, np.uint8), 1, np.zeros(1, np.uint64))
