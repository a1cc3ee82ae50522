"""What is asked of stamps, against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.kernels import stamps as kernels
from deltasync.kernels.stamps import BLOCK_ROWS, GROUP_SHIFTS, GROUPS

Int64s = NDArray[np.int64]
_LARGE = (1 << 62) + 1


@st.composite
def stamps(draw: st.DrawFn) -> Int64s:
    """Mostly one number, with others in between; of less than a block of rows, or of some and a part of one."""
    rows = draw(st.one_of(st.integers(0, 3), st.integers(0, 4 * BLOCK_ROWS)))
    found = np.full(rows, draw(st.integers(0, 3)), np.int64)
    number = st.one_of(st.integers(-5, 5), st.sampled_from([_LARGE, -_LARGE]))
    for row, stamp in draw(st.dictionaries(st.integers(0, max(0, rows - 1)), number, max_size=20)).items():
        found[row : row + 1] = stamp
    return found


def largest_of(found: Int64s) -> Int64s:
    blocks = [np.abs(found[start : start + BLOCK_ROWS]).max() for start in range(0, len(found), BLOCK_ROWS)]
    return np.array(blocks, np.int64)


def rows_of(found: Int64s) -> st.SearchStrategy[Int64s]:
    some = st.sets(st.integers(0, len(found) - 1)) if len(found) else st.just(set[int]())
    return some.map(lambda rows: np.array(sorted(rows), np.int64))


@given(stamps())
def test_the_largest_number_of_each_block(found: Int64s) -> None:
    largest = np.full(-(-len(found) // BLOCK_ROWS), 7, np.int64)
    kernels.largest_of_blocks(found, largest)
    np.testing.assert_array_equal(largest, largest_of(found))


@given(stamps(), st.data(), st.integers(0, 9))
def test_blocks_are_raised_to_the_numbers_of_their_rows(found: Int64s, data: st.DataObject, number: int) -> None:
    ids = data.draw(rows_of(found))
    raised, raised_to_each = largest_of(found), largest_of(found)
    kernels.raise_blocks(ids, number, raised)
    kernels.raise_blocks_to_each(ids, np.where(ids % 2, number, -number), raised_to_each)
    after = found.copy()
    after[ids] = np.maximum(np.abs(found[ids]), number)
    np.testing.assert_array_equal(raised, largest_of(after))
    np.testing.assert_array_equal(raised_to_each, largest_of(after))


@given(stamps(), st.integers(0, 6), st.integers(0, 2))
def test_all_rows_after_a_number(found: Int64s, number: int, more: int) -> None:
    largest = largest_of(found) + more  # It may be more than that of any row.
    ids = np.empty(kernels.rows_in_newer_blocks(largest, number), np.int64)
    count = kernels.rows_after(found, largest, number, ids)
    assert ids[:count].tolist() == np.flatnonzero(np.abs(found) > number).tolist()


@given(stamps(), st.data(), st.integers(0, 6))
def test_those_of_some_rows_after_a_number(found: Int64s, data: st.DataObject, number: int) -> None:
    ids = np.sort(np.concatenate([data.draw(rows_of(found)), data.draw(rows_of(found))]))  # Some of them twice.
    out = np.empty_like(ids)
    count = kernels.rows_of_after(ids, found, number, out)
    assert out[:count].tolist() == np.unique(ids[np.abs(found[ids]) > number]).tolist()


@given(stamps(), st.integers(0, 1 << 20))
def test_stamps_by_group(found: Int64s, more: int) -> None:
    newest = int(np.abs(found).max(initial=0)) + more
    counts = np.zeros((len(GROUP_SHIFTS), GROUPS + 1), np.int64)
    kernels.count_groups(found, newest, counts)
    for shift, line in zip(GROUP_SHIFTS, counts, strict=True):
        ages = np.minimum((newest >> shift) - (np.abs(found) >> shift), GROUPS)
        assert line.tolist() == np.bincount(ages, minlength=GROUPS + 1).tolist()


def test_other_ids_than_64_bit_ones_are_refused() -> None:
    """They would be compiled for, in the middle of a cut."""
    with pytest.raises(TypeError):
        kernels.raise_blocks(np.zeros(1, np.int32), 1, np.zeros(1, np.int64))
