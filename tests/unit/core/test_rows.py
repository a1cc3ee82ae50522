"""Ids of rows: sets of them against those of Python, and their ranges in words."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import Ids, distinct, members, ranges

IDS = st.sets(st.integers(0, 30), max_size=12)


def sorted_ids(ids: set[int]) -> Ids:
    return np.array(sorted(ids), np.int64)


@given(IDS, IDS)
def test_sets_are_as_those_of_python(ids: set[int], others: set[int]) -> None:
    some, more = sorted_ids(ids), sorted_ids(others)
    assert some[members(some, more)].tolist() == sorted(ids & others)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=12))
def test_what_is_there_more_than_once_is_there_once(numbers: list[int]) -> None:
    found = distinct(np.array(numbers, np.uint64))
    assert found.tolist() == sorted(set(numbers))
    assert found.dtype == np.dtype(np.uint64)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3], "row 3"),
        ([3, 4], "rows 3 to 4"),
        ([0, 2, 3, 9], "rows 0, 2 to 3, 9"),
        (range(0, 14, 2), "rows 0, 2, 4, 6, 8 and 2 other ranges"),
    ],
)
def test_ranges_are_told_in_words(ids: Any, words: str) -> None:
    assert ranges(np.array(ids)) == words
