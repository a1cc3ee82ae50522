"""Rows are encoded, decoded and compared bit by bit as one NumPy operation after another does it."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.unit.kernels.reference_codings import CODINGS

from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import VALUE_TYPES
from deltasync.core.value_types import Encoded, ValueType

FP32, FP16 = VALUE_TYPES
LARGEST, TINIEST = float(np.finfo(np.float32).max), 2.0**-149
LOSSY = pytest.mark.parametrize("value_type", [ValueType(name) for name in CODINGS])
TABLES = pytest.mark.parametrize("dtype", VALUE_TYPES, ids=str)
# Multiples of 4, which every type takes: less than a register, more, and with a rest.
DIMS = [4, 8, 12, 20, 32, 36, 64, 100, 132]

Floats = NDArray[np.float32]


def rows(largest: float = LARGEST) -> st.SearchStrategy[Floats]:
    """One or some rows: of all magnitudes, close together, or of numbers of which few tell them apart."""
    shape = st.tuples(st.integers(1, 5), st.sampled_from(DIMS))
    anything = hnp.arrays(np.float32, shape, elements=st.floats(-largest, largest, width=32))
    close = hnp.arrays(np.float32, shape, elements=st.integers(-999, 999))
    factors = st.sampled_from([1.0, 1e-3, 1e-6, 1e-8, 1e-38, 1e-43, 65.0, largest / 1000])
    few = hnp.arrays(np.float32, shape, elements=st.sampled_from([0.0, -0.0, 1.0, -1e-9, 2.0**-24, TINIEST]))
    ends = hnp.arrays(np.float32, shape, elements=st.sampled_from([largest, -largest, 65504.0, 65519.0, 65520.0]))
    scaled = st.tuples(close, factors).map(lambda pair: (pair[0] * np.float32(pair[1])).astype(np.float32))
    return anything | scaled | few | ends.map(lambda values: np.clip(values, -largest, largest))


def assert_same_bits(some: NDArray[np.generic], others: NDArray[np.generic]) -> None:
    word = f"u{some.itemsize}"
    assert some.shape == others.shape
    np.testing.assert_array_equal(some.view(word), others.view(word))


def encoded_as_before(values: Values, value_type: ValueType) -> Encoded:
    """As the reference encodes rows of fp32 or fp16."""
    if value_type is ValueType.FP32 or values.dtype == value_type.dtype:
        return values.astype(value_type.dtype)
    return CODINGS[value_type.value].encode(values.astype(np.float32)).view(value_type.dtype)


@LOSSY
@given(values=rows())
@example(values=np.array([[LARGEST, -LARGEST, 0.0, 1.0], [-0.0, 0.0, -0.0, 0.0]], np.float32))
@example(values=np.array([[0.0, -0.0] * 10, [TINIEST, -TINIEST] * 10], np.float32))
def test_rows_are_encoded_as_before(value_type: ValueType, values: Floats) -> None:
    assert_same_bits(value_type.encode(values), encoded_as_before(values, value_type))


@LOSSY
@given(values=rows(largest=65504.0))
def test_rows_of_fp16_tables_are_encoded_as_before(value_type: ValueType, values: Floats) -> None:
    halves = values.astype(np.float16)
    assert_same_bits(value_type.encode(halves), encoded_as_before(halves, value_type))


@LOSSY
@given(values=rows())
def test_rows_are_decoded_as_before(value_type: ValueType, values: Floats) -> None:
    encoded = value_type.encode(values)
    word = encoded.view(f"u{encoded.itemsize}")
    assert_same_bits(value_type.decode(encoded, FP32), CODINGS[value_type.value].decode(word))


@pytest.mark.parametrize("value_type", [ValueType.FP16, ValueType.BF16])
def test_every_number_of_two_bytes_is_decoded_as_before(value_type: ValueType) -> None:
    words = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    theirs = CODINGS[value_type.value].decode(words)
    ours = value_type.decode(words.view(value_type.dtype), FP32)
    finite = np.isfinite(theirs)
    assert_same_bits(ours[finite], theirs[finite])
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value_type", [ValueType.FP16, ValueType.BF16])
@given(st.data())
def test_numbers_about_half_way_are_rounded_as_before(value_type: ValueType, data: st.DataObject) -> None:
    largest = 0x7BFE if value_type is ValueType.FP16 else 0x7F7E
    words = np.array(data.draw(st.lists(st.integers(0, largest), min_size=8, max_size=8)), np.uint16)[None]
    decode = CODINGS[value_type.value].decode
    half_way = ((decode(words).astype(np.float64) + decode(words + np.uint16(1))) / 2).astype(np.float32)
    for about in (half_way, np.nextafter(half_way, np.float32(0)), np.nextafter(half_way, np.float32(np.inf))):
        for values in (about, -about):
            assert_same_bits(value_type.encode(values), encoded_as_before(values, value_type))


@pytest.mark.parametrize("bits", [8, 4])
@given(data=st.data())
def test_whatever_bytes_of_a_tbe_are_decoded_as_before(bits: int, data: st.DataObject) -> None:
    value_type = ValueType(f"int{bits}-tbe")
    halves = hnp.arrays(np.float16, (3, 2), elements=st.floats(-65504, 65504, width=16))
    codes = data.draw(hnp.arrays(np.uint8, (3, 8 * bits)))
    encoded = np.hstack([codes, data.draw(halves).view(np.uint8)])
    assert_same_bits(value_type.decode(encoded, FP32), CODINGS[value_type.value].decode(encoded))


class Compared(NamedTuple):
    """Rows of a table, rows that are held, and which of them to compare."""

    rows: Values
    held: Encoded
    ids: Ids


@st.composite
def compared(draw: st.DrawFn, value_type: ValueType, dtype: np.dtype[np.generic]) -> Compared:
    """Rows that are held as they are, that have moved a little, or much, or that are held with a changed byte."""
    largest = LARGEST if dtype == FP32 else 65504.0
    before = draw(rows(largest))
    values = before.copy()
    moved = draw(hnp.arrays(np.bool_, len(values)))
    step = draw(st.sampled_from([0.0, 1e-7, 1e-3, 0.5]))
    values[moved] *= np.float32(1 - step)
    if draw(st.booleans()):
        values = -values
    held = encoded_as_before(before.astype(dtype), value_type).copy()
    if draw(st.booleans()):
        held.view(np.uint8)[-1, draw(st.integers(0, held.nbytes // len(held) - 1))] ^= 1
    ids = np.flatnonzero(draw(hnp.arrays(np.bool_, len(values))))
    return Compared(values.astype(dtype), held, ids)


def compared_as_before(case: Compared, value_type: ValueType) -> tuple[NDArray[np.float64], Mask]:
    some, held = case.rows[case.ids], case.held[case.ids]
    decoded = value_type.decode(held, case.rows.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(some.astype(np.float64) - decoded.astype(np.float64), axis=1)
    differs = (encoded_as_before(some, value_type).view(np.uint8) != held.view(np.uint8)).any(axis=1)
    return np.minimum(norms, 1e100), differs


@TABLES
@pytest.mark.parametrize("value_type", ValueType)
@given(data=st.data())
def test_rows_differ_from_those_held_where_they_would_be_encoded_as_other_bits(
    value_type: ValueType, dtype: np.dtype[np.generic], data: st.DataObject
) -> None:
    case = data.draw(compared(value_type, dtype))
    norms, differs = value_type.compare(*case)
    expected, others = compared_as_before(case, value_type)
    np.testing.assert_array_equal(differs, others)
    finite = np.isfinite(expected)  # A changed bit can make an infinite number.
    np.testing.assert_allclose(norms[finite], expected[finite], rtol=1e-12)
