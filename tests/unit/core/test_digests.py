"""Digests of rows: equal for equal tables however they came about, different for different ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.unit.kernels import reference

from deltasync.core.digests import checksum, checksum_of, row_digests, squared_norms
from deltasync.core.rows import Ids
from deltasync.core.tables import STATE_TYPES

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


@given(
    st.sampled_from(STATE_TYPES),
    st.integers(0, 5),
    st.integers(0, 70),
    st.integers(0, 9),
    st.integers(0, 2**32 - 1),
)
def test_a_digest_is_the_sum_of_words_times_their_factors(
    dtype: np.dtype[Any], rows: int, cols: int, first: int, seed: int
) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (rows, cols * dtype.itemsize), np.uint8)
    values = raw.view(dtype) if raw.size else np.zeros((rows, cols), dtype)
    assert row_digests(values, first).tolist() == reference.row_digests(values, first).tolist()


@given(tables(), st.data())
def test_a_checksum_is_the_sum_of_ids_and_digests_mixed(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    assert checksum(ids, row_digests(values)) == reference.checksum(ids, reference.row_digests(values, 0))


def test_two_top_bits_of_numbers_of_64_bits_do_not_cancel() -> None:
    values = np.zeros((1, 2), np.float64)
    assert row_digests(-values) != row_digests(values)


@given(tables(), st.data())
def test_every_flipped_bit_shows(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    before = checksum_of(ids, values)
    row, column = (data.draw(st.integers(0, size - 1)) for size in values.shape)
    flipped = values.view(f"<u{values.itemsize}")
    for bit in range(8 * values.itemsize):
        flipped[row, column] ^= flipped.dtype.type(1 << bit)
        with np.errstate(invalid="ignore"):
            assert checksum_of(ids, values) != before
        flipped[row, column] ^= flipped.dtype.type(1 << bit)
    assert checksum_of(ids, values) == before


def test_no_two_signs_cancel_in_a_row_of_a_thousand_columns() -> None:
    one = np.array([[1]], np.uint32).view(np.float32)
    weights = [int(row_digests(one, column)[0]) % 2**33 for column in range(1024)]
    # A sign is bit 31: what it changes is the weight times 2**31 modulo 2**64, up or down.
    assert len({*weights, *(2**33 - weight for weight in weights)}) == 2 * len(weights)


@given(tables(), st.data())
def test_rows_and_columns_that_are_exchanged_show(table: tuple[Ids, Array], data: st.DataObject) -> None:
    ids, values = table
    for axis in (axis for axis in (0, 1) if values.shape[axis] > 1):
        exchanged = swapped(values, *two_of(data, values.shape[axis]), axis)
        same = np.array_equal(exchanged, values)
        assert (checksum_of(ids, exchanged) == checksum_of(ids, values)) is same
    moved = ids.copy()
    moved[-1] += 1
    assert (checksum_of(moved, values) == checksum_of(ids, values)) is not values[-1].any(), "under another id"


@given(tables())
def test_zeros_add_nothing(table: tuple[Ids, Array]) -> None:
    ids, values = table
    assert not row_digests(np.zeros_like(values)).any()
    assert checksum_of(ids, np.zeros_like(values)) == checksum_of(ids[:0], values[:0]) == 0
    written = values.any(axis=1)
    assert checksum_of(ids[written], values[written]) == checksum_of(ids, values)


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]), (3, 5), elements=st.floats(-(2.0**50), 2.0**50, width=32)
    )
)
def test_squared_norms_are_the_sums_of_the_squares(values: Array) -> None:
    expected = np.square(values.astype(np.float64)).sum(axis=1)
    assert squared_norms(values) == pytest.approx(expected, rel=1e-6, abs=1e-44)


def test_squares_that_do_not_fit_fp32_count_as_the_largest_number() -> None:
    for rows in (np.array([[LARGEST, -LARGEST], [1e30, 0.0]], np.float32), np.array([[1e300, 0], [np.inf, 1]])):
        assert squared_norms(rows).tolist() == [LARGEST] * 2


# 8192 numbers are what NumPy takes at once by itself.
@given(st.sampled_from([1, 3, 8, 64, 100, 1000, 9000]), st.integers(0, 2**32 - 1))
@example(9000, 0)
def test_a_row_has_the_same_digest_and_norm_whatever_rows_come_with_it(dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((6, dim), np.float32)
    for row in range(6):
        assert row_digests(values)[row] == row_digests(values[row : row + 1])[0]
        assert squared_norms(values)[row] == squared_norms(values[row : row + 1])[0]
