"""Copies that follow what they are of, compared with NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deltasync.kernels import changes

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
    count = changes.follow_rows(rows.reshape(-1), shape[1], copy.reshape(-1), ids)
    assert ids[:count].tolist() == expected
    assert (ids[count:] == -1).all()
    assert np.array_equal(copy, rows)


def _flips(shape: tuple[int, int], bits: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    rows, columns = shape
    if not rows:
        return st.just([])
    flip = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1), st.integers(0, bits - 1))
    return st.lists(flip, max_size=5)


@given(NUMBERS, st.integers(-2, 2), st.lists(st.integers(0, 2999), max_size=5))
def test_numbers_that_differ_are_copied(numbers: np.ndarray, plus: int, others: list[int]) -> None:
    copy = numbers + plus
    changed = sorted({index for index in others if index < len(numbers)})
    copy[changed] += 1
    ids = np.full(len(numbers) + 1, -1)
    count = changes.follow_numbers(numbers, plus, copy, ids)
    assert ids[:count].tolist() == changed
    assert (ids[count:] == -1).all()
    assert np.array_equal(copy, numbers + plus)


def test_numbers_wrap() -> None:
    numbers, copy, ids = np.array([2**63 - 1]), np.zeros(1, np.int64), np.empty(1, np.int64)
    assert changes.follow_numbers(numbers, 1, copy, ids) == 1
    assert copy.tolist() == [-(2**63)]
