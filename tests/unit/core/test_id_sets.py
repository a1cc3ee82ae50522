"""Sets of ids against Python's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import Ids, distinct, members

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
