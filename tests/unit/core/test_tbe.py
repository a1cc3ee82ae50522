"""Rows for a TBE: bit by bit what fbgemm makes of them, but for rows like zero and what fp16 cannot hold."""

import fbgemm_gpu  # noqa: F401  It registers the operators.
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.policy import Policy
from deltasync.core.tables import VALUE_TYPES, TableKind, TableSpec
from deltasync.core.value_types import ValueType, of_tbe, to_tbe, width

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LARGEST_FP16 = 65504.0
# Whose rows fill pairs of bytes, which fbgemm asks for.
DIMS = {8: [2, 4, 6, 8, 10, 16, 30, 32, 64, 100], 4: [4, 8, 12, 16, 20, 32, 64, 100]}
BITS = pytest.mark.parametrize("bits", DIMS)
FP32 = VALUE_TYPES[0]


def fbgemm(values: NDArray[np.generic], bits: int) -> Bytes:
    """Rows as fbgemm quantises them, with scale and bias first as in a TBE."""
    rows: Bytes = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
        torch.from_numpy(values.copy()), bits
    ).numpy()
    return np.roll(rows, 4, axis=1)


def fbgemm_values(rows: Bytes, bits: int) -> Floats:
    values: Floats = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(
        torch.from_numpy(np.roll(rows, -4, axis=1)), bits
    ).numpy()
    return values


def encode_tbe(values: NDArray[np.generic], bits: int) -> Bytes:
    return ValueType(f"int{bits}-tbe").encode(values).view(np.uint8)


def decode_tbe(rows: Bytes, bits: int) -> Floats:
    return ValueType(f"int{bits}-tbe").decode(rows, FP32).view(np.float32)


def rows_of(bits: int, largest: float = LARGEST_FP16) -> st.SearchStrategy[Floats]:
    """Rows of values of all magnitudes, close together, or of few."""
    shape = st.tuples(st.integers(1, 4), st.sampled_from(DIMS[bits]))
    anything = hnp.arrays(np.float32, shape, elements=st.floats(-largest, largest, width=32))
    close = hnp.arrays(np.float32, shape, elements=st.integers(-999, 999))
    factors = st.sampled_from([1.0, 1e-3, 1e-6, 1e-7, 1e-8, 1e-9, 1e-38, 65.0])
    few = hnp.arrays(np.float32, shape, elements=st.sampled_from([0.0, -0.0, 1.0, 1e-9, -1e-9, 2.0**-24]))
    scaled = st.tuples(close, factors).map(lambda pair: (pair[0] * pair[1]).astype(np.float32))
    return anything | scaled | few


@BITS
@pytest.mark.parametrize("dtype", VALUE_TYPES, ids=str)
@given(data=st.data())
def test_rows_are_bit_by_bit_those_of_fbgemm(bits: int, dtype: np.dtype[np.generic], data: st.DataObject) -> None:
    values = data.draw(rows_of(bits)).astype(dtype)
    np.testing.assert_array_equal(to_tbe(encode_tbe(values, bits)), fbgemm(values, bits))


@BITS
def test_many_ordinary_rows_are_those_of_fbgemm(bits: int) -> None:
    generator = np.random.default_rng(bits)
    for scale in (1e-4, 0.05, 1.0, 300.0):
        values = (generator.standard_normal((20_000, 32)) * scale).astype(np.float32)
        np.testing.assert_array_equal(encode_tbe(values, bits), fbgemm(values, bits))


@BITS
@given(data=st.data())
def test_rows_come_back_as_fbgemm_looks_them_up(bits: int, data: st.DataObject) -> None:
    """But for the last bit, where it multiplies and adds at once."""
    encoded = encode_tbe(data.draw(rows_of(bits)), bits)
    theirs, ours = fbgemm_values(to_tbe(encoded.copy()), bits), decode_tbe(encoded, bits)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-3 * np.abs(theirs).max() / 255)
    codes, (scale, bias) = encoded[:, 4:], encoded[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    if bits == 4:
        codes = np.stack([codes & 0xF, codes >> 4], axis=2).reshape(len(codes), -1)
    assert ours.tobytes() == (codes.astype(np.float32) * scale + bias).tobytes()


@BITS
@given(data=st.data())
@example(data=None)
def test_a_row_is_zero_bytes_exactly_where_fbgemm_has_it_like_zero(bits: int, data: st.DataObject | None) -> None:
    values = data.draw(rows_of(bits)) if data else np.zeros((2, 8), np.float32)
    zero = fbgemm(np.zeros((1, values.shape[1]), np.float32), bits)
    like_zero = (fbgemm(values, bits) == zero).all(axis=1)
    np.testing.assert_array_equal(like_zero, ~encode_tbe(values, bits).any(axis=1))


@BITS
@given(data=st.data())
def test_what_a_tbe_has_is_sent_and_written_without_loss(bits: int, data: st.DataObject) -> None:
    shape = st.tuples(st.integers(1, 4), st.just(width(8, bits)))
    rows = data.draw(hnp.arrays(np.uint8, shape, elements=st.sampled_from([0, 0x3C, 0x80, 1])))
    rows[rows[:, :2].view("<u2")[:, 0] == 0, 1] = 0x3C  # fbgemm has no scale of 0.
    np.testing.assert_array_equal(to_tbe(of_tbe(rows.copy())), rows)


@BITS
def test_what_fp16_cannot_hold_is_served_as_the_largest_number_it_has(bits: int) -> None:
    values = np.array([[1e30, -1e30, 0, 0], [-7e4, 1, 2, 3], [7e4, 7e4, 7e4, 7e4]], np.float32)
    back = decode_tbe(encode_tbe(values, bits), bits)
    assert np.isfinite(back).all()
    assert back[1, 0] == -LARGEST_FP16
    assert (back[2] >= LARGEST_FP16).all()


@pytest.mark.parametrize(("value_type", "dim"), [(ValueType.INT8_TBE, 5), (ValueType.INT4_TBE, 6)])
def test_a_table_whose_rows_fbgemm_cannot_quantise_is_refused(value_type: ValueType, dim: int) -> None:
    with pytest.raises(InvalidInput, match=rf"table 't' has dim {dim}.*{value_type.value} needs a multiple of"):
        Policy(value_type=value_type).check([TableSpec("t", 3, dim)])
    Policy(value_type=value_type).check([TableSpec("t", 3, 8), TableSpec("bias", 1, 3, kind=TableKind.PARAMETER)])
