"""Digests of rows: equal for equal tables however they came about, different for different ones."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deltasync.core import digests
from deltasync.core.digests import Digest, digest
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import VALUE_TYPES

Array = NDArray[Any]

LARGEST = float(np.finfo(np.float32).max)


@st.composite
def tables(draw: st.DrawFn, *, rows: int = 8, cols: int = 9) -> tuple[Ids, Array]:
    """Ids, and rows of small whole numbers: their squares are exact, however they are added."""
    shape = (draw(st.integers(1, rows)), draw(st.integers(1, cols)))
    ids = draw(st.lists(st.integers(0, 2**40 - 1), min_size=shape[0], max_size=shape[0], unique=True).map(sorted))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    return np.array(ids, np.int64), draw(hnp.arrays(dtype, shape, elements=st.integers(-60, 60)))


def swapped(values: Array, first: int, second: int, axis: int) -> Array:
    order = np.arange(values.shape[axis])
    order[[first, second]] = second, first
    return np.take(values, order, axis=axis)


def two_of(data: st.DataObject, count: int) -> tuple[int, int]:
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    return first, second


@given(tables(), st.data(), st.integers(1, 4))
def test_the_order_and_the_blocks_in_which_rows_come_do_not_matter(
    table: tuple[Ids, Array], data: st.DataObject, block_rows: int
) -> None:
    ids, values = table
    order = np.array(data.draw(st.permutations(range(len(ids)))))
    whole = digest(ids, values)
    assert digest(ids[order], values[order]) == whole
    with mock.patch.object(digests, "BLOCK_ROWS", block_rows):
        assert digest(ids, values) == whole
    by_row = [digest(ids[row : row + 1], values[row : row + 1]) for row in order]
    assert sum(by_row, Digest()) == whole


@given(tables(), st.data())
def test_rows_subtracted_as_they_were_and_added_as_they_are_make_the_digest_of_the_table(
    table: tuple[Ids, Array], data: st.DataObject
) -> None:
    ids, values = table
    running = digest(ids, values)
    for _ in range(data.draw(st.integers(1, 5))):
        rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(ids) - 1)))), np.int64)
        first = data.draw(st.integers(0, values.shape[1] - 1))
        columns = slice(first, data.draw(st.integers(first + 1, values.shape[1])))
        shape = values[rows, columns].shape
        running -= digest(ids[rows], values[rows, columns], first)
        values[rows, columns] = data.draw(hnp.arrays(values.dtype, shape, elements=st.integers(-60, 60)))
        running += digest(ids[rows], values[rows, columns], first)
    assert running == digest(ids, values)


@given(tables(), st.data())
def test_blocks_of_columns_add_up_to_the_rows(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    cut = data.draw(st.integers(0, values.shape[1]))
    assert digest(ids, values[:, :cut]) + digest(ids, values[:, cut:], cut) == digest(ids, values)


@given(tables(), st.data())
def test_every_flipped_bit_shows(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    before = digest(ids, values).checksum
    row, column = (data.draw(st.integers(0, size - 1)) for size in values.shape)
    flipped = values.view(f"<u{values.itemsize}")
    for bit in range(8 * values.itemsize):
        flipped[row, column] ^= flipped.dtype.type(1 << bit)
        with np.errstate(invalid="ignore"):
            assert digest(ids, values).checksum != before
        flipped[row, column] ^= flipped.dtype.type(1 << bit)
    assert digest(ids, values).checksum == before


@given(tables(cols=64), st.data())
def test_two_signs_flipped_in_one_row_show(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    assume(values.shape[1] > 1)
    row = data.draw(st.integers(0, len(ids) - 1))
    first, second = two_of(data, values.shape[1])
    flipped = values.copy()
    flipped[row, [first, second]] *= -1
    assert digest(ids, flipped).checksum != digest(ids, values).checksum
    assert digest(ids, flipped).square_sum == digest(ids, values).square_sum


def test_no_two_signs_cancel_in_a_row_of_a_thousand_columns() -> None:
    one = np.array([[1]], np.uint32).view(np.float32)
    weights = [digest(np.zeros(1, np.int64), one, column).checksum % 2**33 for column in range(1024)]
    # A sign is bit 31: what it changes is the weight times 2**31 modulo 2**64, up or down.
    assert len({*weights, *(2**33 - weight for weight in weights)}) == 2 * len(weights)


@given(tables(), st.data())
def test_two_rows_swapped_show(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    assume(len(ids) > 1)
    first, second = two_of(data, len(ids))
    assume(not np.array_equal(values[first], values[second]))
    assert digest(ids, swapped(values, first, second, 0)).checksum != digest(ids, values).checksum


@given(tables(), st.data())
def test_two_columns_swapped_show(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    assume(values.shape[1] > 1)
    first, second = two_of(data, values.shape[1])
    assume(not np.array_equal(values[:, first], values[:, second]))
    assert digest(ids, swapped(values, first, second, 1)).checksum != digest(ids, values).checksum


@given(tables())
def test_a_row_under_another_id_shows(table: tuple[Ids, Array]) -> None:
    ids, values = table
    assume(values[-1].any())
    moved = ids.copy()
    moved[-1] += 1
    assert digest(moved, values).checksum != digest(ids, values).checksum


@given(tables())
def test_zeros_add_nothing(table: tuple[Ids, Array]) -> None:
    ids, values = table
    assert digest(ids, np.zeros_like(values)) == Digest()
    assert digest(ids[:0], values[:0]) == Digest()
    written = values.any(axis=1)
    assert digest(ids[written], values[written]) == digest(ids, values)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_negative_zero_is_not_a_zero_to_the_checksum(dtype: np.dtype[np.generic]) -> None:
    found = digest(np.zeros(1, np.int64), np.array([[-0.0]], dtype))
    assert found.checksum != 0
    assert found.square_sum == 0


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(-(2.0**50), 2.0**50, width=32)))
def test_the_square_sum_is_the_sum_of_the_squares(values: Values) -> None:
    expected = float(np.square(values.astype(np.float64)).sum())
    assert digest(np.arange(3), values).square_sum == pytest.approx(expected, rel=1e-5, abs=1e-40)


def test_rows_whose_squares_do_not_fit_fp32_count_as_the_largest_number() -> None:
    rows = np.array([[LARGEST, -LARGEST], [1e30, 0.0]], np.float32)
    huge = digest(np.arange(2), rows)
    assert huge.square_sum == 2 * LARGEST
    assert (huge - huge).square_sum == 0


@given(tables(), tables())
def test_digests_are_added_and_subtracted_like_numbers(one: tuple[Ids, Array], two: tuple[Ids, Array]) -> None:
    first, second = digest(*one), digest(*two)
    assert first + second == second + first
    assert first + second - second == first
    assert 0 <= (Digest() - first).checksum < 2**64
    assert first + (Digest() - first) == Digest()


# 8192 numbers are what NumPy takes at once by itself.
@given(st.sampled_from([1, 3, 8, 64, 100, 1000, 9000]), st.integers(0, 2**32 - 1))
@example(9000, 0)
def test_a_rows_part_is_the_same_bits_whatever_rows_come_with_it(dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((6, dim), np.float32)
    ids = np.arange(6)
    for row in range(1, 6):
        together = digest(ids[[0, row]], np.stack([np.zeros(dim, np.float32), values[row]]))
        assert together == digest(ids[row : row + 1], values[row : row + 1])
