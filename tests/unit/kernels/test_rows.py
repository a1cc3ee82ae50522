"""Kernels that move rows and keep their digests, against NumPy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.kernels import reference

from deltasync.core.digests import weights
from deltasync.kernels.digests import exchange
from deltasync.kernels.rows import gather, gather_checked, put, scatter, write

Array = NDArray[Any]
DTYPES = ["u1", "<u2", "<u4"]
DIGESTS = st.sampled_from([0, 1, 2**63, 2**64 - 1])


def words(rows: int, width: int, dtype: str, seed: int) -> Array:
    numbers: Array = np.random.default_rng(seed).integers(
        0, 256, (rows, width * np.dtype(dtype).itemsize), np.uint8
    )
    return numbers.view(dtype)


@st.composite
def numbers(draw: st.DrawFn, rows: int) -> Array:
    """None, one, some or all of so many row numbers."""
    some = st.sets(st.integers(0, rows - 1)).map(sorted)
    return np.array(draw(some | st.just([*range(rows)])), np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(1, 9), st.integers(1, 40), st.integers(0, 9))
def test_rows_are_scattered_and_gathered_bit_by_bit(
    dtype: str, data: st.DataObject, rows: int, width: int, seed: int
) -> None:
    table, ids = words(rows, width, dtype, seed), data.draw(numbers(rows))
    first = data.draw(st.integers(0, width - 1))
    columns = slice(first, data.draw(st.integers(first + 1, width)))
    some = words(len(ids), columns.stop - first, dtype, seed + 1)
    some.flags.writeable = False
    expected = table.copy()
    expected[ids, columns] = some
    scatter(table, first, ids, some)
    assert np.array_equal(table, expected)
    narrow = data.draw(st.integers(1, width))
    found = np.zeros((len(ids), narrow), dtype)
    gather(table, ids, found)
    assert np.array_equal(found, expected[ids, :narrow])


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_rows_are_put_and_digested_as_they_lie(
    dtype: str, data: st.DataObject, rows: int, width: int, padding: int
) -> None:
    table, ids = words(rows, width + padding, dtype, 0), data.draw(numbers(rows))
    some = np.frombuffer(b"x" + words(len(ids), width, dtype, 1).tobytes(), np.uint8, offset=1)
    expected = table.copy()
    expected[ids, :width] = np.frombuffer(some.tobytes(), dtype).reshape(len(ids), width)
    digests = np.zeros(len(ids), np.uint64)
    given_rows = some.reshape(len(ids), width * table.itemsize)
    put(table.view(np.uint8), table, ids, given_rows, weights(0, width), digests)
    assert np.array_equal(table, expected)
    assert np.array_equal(digests, reference.row_digests(expected[ids, :width]))


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_rows_are_gathered_and_those_counted_that_do_not_fit(
    dtype: str, data: st.DataObject, rows: int, width: int
) -> None:
    table, ids = words(rows, width, dtype, 0), data.draw(numbers(rows))
    expected = reference.row_digests(table)
    kept, wrong = expected.copy(), data.draw(numbers(rows))
    kept[wrong] += np.uint64(2**63)
    found, digests = np.zeros((len(ids), width), dtype), np.zeros(len(ids), np.uint64)
    factors = weights(0, width)
    assert gather_checked(table, kept, ids, factors, found, digests) == np.count_nonzero(np.isin(ids, wrong))
    assert np.array_equal(found, table[ids])
    assert np.array_equal(digests, expected[ids])


NONE = np.zeros(0, np.uint64), np.zeros((0, 0), np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans())
def test_columns_are_written_with_stamps_and_digests(
    dtype: str, data: st.DataObject, rows: int, width: int, one_stamp: bool, unchecked: bool
) -> None:
    table, slots = words(rows, width, dtype, 0), data.draw(numbers(rows))
    digests, stamps = reference.row_digests(table), np.full(rows, 7)
    ids = 5 + 3 * np.arange(rows)  # Of the rows, by slot.
    first = data.draw(st.integers(0, width - 1))
    columns = slice(first, data.draw(st.integers(first + 1, width)))
    some = words(len(slots), columns.stop - first, dtype, 1)
    before, expected = reference.checksum(ids, digests), table.copy()
    expected[slots, columns] = some
    new_stamps = np.array([9]) if one_stamp else -np.arange(1, len(slots) + 1)
    factors = NONE[0] if some.shape[1] == width and unchecked else weights(first, some.shape[1])
    new_digests = reference.row_digests(some, first)
    arrays = table, stamps, digests, NONE[1], first, first, slots, ids[slots]
    change, squares, wrong = write(*arrays, some, new_stamps, new_digests, NONE[1], factors)
    assert wrong == 0
    assert np.array_equal(table, expected)
    assert np.array_equal(digests, reference.row_digests(expected))
    expected_stamps = np.full(rows, 7)
    expected_stamps[slots] = new_stamps
    assert np.array_equal(stamps, expected_stamps)
    assert (before + int(change)) % 2**64 == reference.checksum(ids, digests)
    assert squares == 0


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@given(st.data(), st.integers(1, 9), st.integers(1, 20))
def test_the_sum_of_squares_moves_by_what_is_written(
    dtype: str, data: st.DataObject, rows: int, width: int
) -> None:
    table, ids = np.random.default_rng(0).integers(-9, 9, (rows, width)).astype(dtype), data.draw(numbers(rows))
    first = data.draw(st.integers(0, width - 1))
    some = np.full((len(ids), width - first), 3, dtype)
    before = np.square(table).sum()
    halves = table.itemsize // 4
    table_words, some_words = (each.view("<u4") for each in (table, some))
    arrays = table_words, np.zeros(rows, np.int64), np.zeros(rows, np.uint64), table
    digests, factors = np.zeros(len(ids), np.uint64), weights(first * halves, some_words.shape[1])
    firsts = first * halves, first
    _, change, _ = write(*arrays, *firsts, ids, ids, some_words, np.array([1]), digests, some, factors)
    assert before + change == np.square(table).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data(), st.integers(1, 9), st.integers(1, 40))
def test_written_rows_that_differ_from_their_digests_are_counted(
    dtype: str, data: st.DataObject, rows: int, width: int
) -> None:
    """They keep the given digest, so that a later read of them finds the damage."""
    table, ids = words(rows, width, dtype, 0), np.arange(rows)
    digests = reference.row_digests(table)
    first = data.draw(st.integers(0, width - 1))
    columns = slice(first, data.draw(st.integers(first + 1, width)))
    some, wrong = words(rows, columns.stop - first, dtype, 1), data.draw(numbers(rows))
    claimed = reference.row_digests(some, first)
    claimed[wrong] += np.uint64(2**63)
    arrays = table, np.zeros(rows, np.int64), digests, NONE[1], first, first, ids, ids
    factors = weights(first, some.shape[1])
    _, _, found = write(*arrays, some, np.array([1]), claimed, NONE[1], factors)
    assert found == len(wrong)
    assert np.array_equal(table[:, columns], some)
    expected = reference.row_digests(table)
    expected[wrong] += np.uint64(2**63)
    assert np.array_equal(digests, expected)


@given(st.data(), st.integers(1, 9))
def test_exchanging_digests_changes_the_checksum_by_their_difference(data: st.DataObject, rows: int) -> None:
    held = np.array(data.draw(st.lists(DIGESTS, min_size=rows, max_size=rows)), np.uint64)
    ids = data.draw(numbers(rows))
    digests = np.array(data.draw(st.lists(DIGESTS, min_size=len(ids), max_size=len(ids))), np.uint64)
    before, expected = reference.checksum(np.arange(rows), held), held.copy()
    expected[ids] = digests
    change = int(exchange(held, ids, digests))
    assert np.array_equal(held, expected)
    assert (before + change) % 2**64 == reference.checksum(np.arange(rows), expected)
