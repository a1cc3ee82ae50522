"""What is sent of values, and what they are when they come back: against torch and fbgemm."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import fbgemm_gpu  # noqa: F401  It registers the operators that int8 is compared with.
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from deltasync.core.tables import MAX_DIM, VALUE_TYPES, TableSpec
from deltasync.core.value_types import ValueType, own_type, sent_as

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]
F = TypeVar("F", bound=np.floating)

FP32, FP16 = VALUE_TYPES
LARGEST, LARGEST_FP16 = float(np.finfo(np.float32).max), float(np.finfo(np.float16).max)
TINIEST, TINIEST_NORMAL = 2.0**-149, 2.0**-126
DIMS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100]

# Each is repeated, cut and turned until it fills a row.
EDGES: dict[str, Sequence[float]] = {
    "constant": [3.25],
    "constant and negative": [-0.1],
    "zero": [0.0],
    "negative zero": [-0.0],
    "both zeros": [0.0, -0.0],
    "both zeros, and more": [-0.0, 0.0, 1.5],
    "huge": [1e37, -1e37, 3e36],
    "huge, of one sign": [LARGEST, 3e38, 1e38],
    "as wide as fp32 allows": [LARGEST / 2, -LARGEST / 2, 1.0],
    "tiny": [1e-30, -2e-30, 3e-31],
    "about epsilon": [1e-8, -2e-8, 3e-9, 5e-8],
    "denormal": [TINIEST, 5 * TINIEST, -3 * TINIEST, TINIEST_NORMAL / 3],
    "denormal range": [TINIEST_NORMAL, TINIEST_NORMAL + 200 * TINIEST, TINIEST_NORMAL + 77 * TINIEST],
    "one step wide": [1.0, 1.0 + 2.0**-23],
    "far from zero": [1e6, 1e6 + 1, 1e6 + 0.25],
    "ties": [0.0, 255.0, 0.5, 1.5, 2.5, 126.5, 253.5, 254.5],
    "a small lowest": [1.4450862e-39, 0.5071345, 0.02, 0.3],
    "ordinary": [0.013, -0.2, 0.07, 0.11, -0.09, 0.05, -0.01],
}


def edge_row(name: str, dim: int) -> Floats:
    return np.resize(np.array(EDGES[name], np.float32), dim)[None]


def floats(dtype: np.dtype[np.generic], largest: float | None = None) -> st.SearchStrategy[float]:
    lowest = None if largest is None else -largest
    if dtype == FP32:
        return st.floats(lowest, largest, width=32, allow_nan=False, allow_infinity=False)
    # By their bits: `st.floats` draws wider floats, and throws nearly all of them away.
    halves = st.integers(0, 2**16 - 1).map(lambda bits: float(np.uint16(bits).view(np.float16)))
    return halves.map(lambda value: value if np.isfinite(value) else 0.0)


def rows(largest: float | None = None) -> st.SearchStrategy[Floats]:
    """Rows in which every value is one of few, or any: of all magnitudes, or close together."""
    shape = st.tuples(st.integers(1, 4), st.sampled_from(DIMS))
    anything = hnp.arrays(np.float32, shape, elements=floats(FP32, largest))
    close = hnp.arrays(np.float32, shape, elements=st.integers(-999, 999))
    factors = st.sampled_from([1.0, 1e-3, 1e-8, 1e-9, 1e-38, 1e-43, 1e34])
    return anything | st.tuples(close, factors).map(lambda pair: (pair[0] * pair[1]).astype(np.float32))


def tables() -> st.SearchStrategy[TableSpec]:
    return st.builds(TableSpec, st.just("t"), st.integers(1, 9), st.integers(1, 200), st.sampled_from(VALUE_TYPES))


def bits(values: NDArray[np.generic]) -> list[list[int]]:
    listed: list[list[int]] = values.view(f"<u{values.itemsize}").tolist()
    return listed


def fbgemm_codes(values: Floats) -> Bytes:
    """fbgemm's rows, but that a bias of zero has no sign."""
    fused: Bytes = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(values.copy())).numpy()
    bias = fused[:, -4:].copy().view(np.float32) + np.float32(0)
    return np.concatenate([fused[:, :-4], bias.view(np.uint8)], axis=1)


def fbgemm_values(encoded: Bytes) -> Floats:
    values: Floats = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(encoded.copy())).numpy()
    return values


def check_comes_back_as_with_fbgemm(encoded: NDArray[np.generic]) -> None:
    """Rounded once: as fbgemm gives it, but for the last bit where a bias is so small beside the scale that
    the order of roundings tells: fbgemm itself then differs between the columns of one row.
    """
    ours, theirs = ValueType.INT8.decode(encoded, FP32), fbgemm_values(encoded.view(np.uint8))
    scale, bias = np.ascontiguousarray(encoded[:, -8:]).view("<f4").astype(np.float64).T[..., None]
    exact = encoded[:, :-8].view(np.uint8) * scale + bias
    assert bits(ours) == bits(np.clip(exact, -LARGEST, LARGEST).astype(np.float32))
    plain = ((bias == 0) | (np.abs(bias) >= np.abs(scale) * 2.0**-21))[:, 0]
    assert bits(ours[plain]) == bits(theirs[plain])
    assert np.all(np.abs(ours.view(np.int32).astype(np.int64) - theirs.view(np.int32)) <= 1)


def widened(values: NDArray[F], value_type: ValueType) -> NDArray[F]:
    """The rows, or so many times themselves that their dim is one that the type takes."""
    return np.tile(values, (1, value_type.dim_multiple))


def there_and_back(values: NDArray[np.generic], value_type: ValueType) -> NDArray[np.generic]:
    return value_type.decode(value_type.encode(values), values.dtype)


@pytest.mark.parametrize("name", EDGES)
def test_int8_edge_rows_are_sent_and_come_back_as_with_fbgemm(name: str) -> None:
    for dim in DIMS:
        row = edge_row(name, dim)
        encoded = ValueType.INT8.encode(row)
        assert bits(encoded) == bits(fbgemm_codes(row))
        check_comes_back_as_with_fbgemm(encoded)


@given(rows(largest=LARGEST / 4))
def test_int8_rows_are_sent_and_come_back_as_with_fbgemm(values: Floats) -> None:
    encoded = ValueType.INT8.encode(values)
    assert bits(encoded) == bits(fbgemm_codes(values))
    check_comes_back_as_with_fbgemm(encoded)


def test_equal_columns_decode_equally_despite_a_tiny_bias() -> None:
    scale_and_bias = np.array([[1.1473726e-10, 1.8209743e-26]], "<f4")
    encoded = np.concatenate([np.full((1, 33), 6, np.uint8), scale_and_bias.view(np.uint8)], axis=1)
    assert len(set(ValueType.INT8.decode(encoded, FP32)[0].tolist())) == 1
    check_comes_back_as_with_fbgemm(encoded)


def test_an_int8_row_of_the_widest_range_stays_finite() -> None:
    scale_and_bias = np.array([[LARGEST / 254, 0.0]], "<f4")
    encoded = np.concatenate([np.array([[255]], np.uint8), scale_and_bias.view(np.uint8)], axis=1)
    assert np.isposinf(fbgemm_values(encoded)).all()
    assert ValueType.INT8.decode(encoded, FP32).tolist() == [[LARGEST]]


@pytest.mark.parametrize("dim", DIMS[1:])
def test_a_range_beyond_fp32_stays_finite_where_fbgemm_gives_nan(dim: int) -> None:
    row = np.resize(np.array([LARGEST, -LARGEST, 0.0, 2.01e38], np.float32), dim)[None]
    assert np.isnan(fbgemm_values(fbgemm_codes(row))).any()
    back = there_and_back(row, ValueType.INT8)
    assert np.isfinite(back).all()
    assert back[0, :2].tolist() == [LARGEST, -LARGEST]
    assert np.abs(back.astype(np.float64) - row).max() <= LARGEST / 255 * 1.01


@given(rows())
@example(np.array([[LARGEST, -LARGEST], [1.0, 1.0]], np.float32))
@example(np.array([[LARGEST, -LARGEST, 0.0], [3e-9, -2e-9, 1e-9], [TINIEST, 0.0, 3 * TINIEST]], np.float32))
def test_how_a_row_is_encoded_does_not_depend_on_the_rows_beside_it(values: Floats) -> None:
    for value_type in ValueType:
        wide = widened(values, value_type)
        alone = [bits(value_type.encode(wide[row : row + 1]))[0] for row in range(len(wide))]
        assert bits(value_type.encode(wide)) == alone


@given(hnp.arrays(np.float32, (3, 40), elements=floats(FP32)))
def test_bf16_equals_torch_but_never_becomes_infinite(values: Floats) -> None:
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    largest = torch.tensor(torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    theirs = torch.where(theirs.isinf(), largest.copysign(theirs), theirs)
    encoded = ValueType.BF16.encode(values)
    assert encoded.dtype == np.uint16
    assert bits(encoded) == bits(theirs.view(torch.int16).numpy())
    assert bits(ValueType.BF16.decode(encoded, FP32)) == bits(theirs.float().numpy())


@pytest.mark.parametrize(
    ("value_type", "plain"), [(ValueType.FP16, torch.float16), (ValueType.BF16, torch.bfloat16)]
)
def test_numbers_of_two_bytes_are_those_of_torch(value_type: ValueType, plain: torch.dtype) -> None:
    words = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    numbers = torch.from_numpy(words.view(np.int16)).view(plain).float().numpy()
    np.testing.assert_array_equal(value_type.decode(words.view(value_type.dtype), FP32), numbers)
    positive = np.sort(numbers[np.isfinite(numbers) & (numbers >= 0)])
    half_way = ((positive[1:].astype(np.float64) + positive[:-1]) / 2).astype(np.float32)
    for about in (half_way, np.nextafter(half_way, np.float32(0)), np.nextafter(half_way, np.float32(np.inf))):
        values = np.stack([about, -about])
        theirs = torch.from_numpy(values).to(plain).view(torch.int16).numpy()
        assert bits(value_type.encode(values)) == bits(theirs)


@given(hnp.arrays(np.float32, (3, 9), elements=floats(FP32) | floats(FP32, 70000.0)))
def test_fp16_values_are_rounded_and_clipped_to_the_largest(values: Floats) -> None:
    nearest = np.clip(values.astype(np.float64), -LARGEST_FP16, LARGEST_FP16)
    back = there_and_back(values, ValueType.FP16).astype(np.float64)
    assert (np.abs(back - nearest) <= np.maximum(np.abs(nearest) * 2.0**-11, 2.0**-25)).all()
    too_large = np.abs(values) >= LARGEST_FP16
    assert np.array_equal(back[too_large], np.copysign(LARGEST_FP16, values[too_large]))
    inside = torch.from_numpy(values[~too_large]).half().numpy()
    assert np.array_equal(ValueType.FP16.encode(values)[~too_large].view(np.uint16), inside.view(np.uint16))


@given(rows(), hnp.arrays(np.float16, (2, 5), elements=floats(FP16)))
def test_what_is_sent_as_it_is_comes_back_bit_by_bit(whole: Floats, half: Halves) -> None:
    assert bits(there_and_back(whole, ValueType.FP32)) == bits(whole)
    assert bits(there_and_back(half, ValueType.FP16)) == bits(half)
    assert bits(there_and_back(half, ValueType.FP32)) == bits(half)


@given(rows(), st.sampled_from(ValueType))
def test_no_finite_row_comes_back_as_nan_or_infinity(values: Floats, value_type: ValueType) -> None:
    assert np.isfinite(there_and_back(widened(values, value_type), value_type)).all()


@given(hnp.arrays(np.float16, st.tuples(st.integers(1, 3), st.sampled_from(DIMS)), elements=floats(FP16)))
@example(np.array([[LARGEST_FP16, -LARGEST_FP16, 1.0]], np.float16))
@example(np.array([[LARGEST_FP16, 65472.0]], np.float16))
def test_rows_of_an_fp16_table_come_back_as_fp16_and_finite(values: Halves) -> None:
    for value_type in (ValueType.FP16, ValueType.INT8, ValueType.INT8_TBE):
        values = widened(values, value_type)
        back = there_and_back(values, value_type)
        assert back.dtype == FP16
        assert np.isfinite(back).all()
    wide = ValueType.INT8.encode(values.astype(np.float32))
    assert bits(ValueType.INT8.encode(values)) == bits(wide)


@given(rows(), st.sampled_from(ValueType))
def test_rows_that_do_not_lie_side_by_side_are_encoded_alike(values: Floats, value_type: ValueType) -> None:
    values = widened(values, value_type)
    spread = np.full((2 * len(values), 2 * values.shape[1]), 7, np.float32)
    spread[::2, ::2] = values
    before = bits(values)
    expected = bits(value_type.encode(values))
    assert bits(value_type.encode(spread[::2, ::2])) == expected
    assert bits(value_type.encode(np.asfortranarray(values))) == expected
    assert bits(values) == before


@pytest.mark.parametrize(("value_type", "dtype"), list(product(ValueType, VALUE_TYPES)))
def test_no_rows_are_encoded_as_no_rows(value_type: ValueType, dtype: np.dtype[np.generic]) -> None:
    encoded = value_type.encode(np.zeros((0, 4), dtype))
    assert encoded.shape == (0, value_type.encoded_spec(TableSpec("t", 1, 4, dtype)).dim)
    back = value_type.decode(encoded, dtype)
    assert (back.shape, back.dtype) == ((0, 4), dtype)


@given(tables(), st.sampled_from(ValueType))
def test_encoded_rows_are_what_their_table_and_their_size_say(table: TableSpec, value_type: ValueType) -> None:
    table = replace(table, dim=table.dim * value_type.dim_multiple)
    encoded = value_type.encode(np.ones((table.rows, table.dim), table.dtype))
    stored = value_type.encoded_spec(table)
    assert (stored.name, stored.rows) == (table.name, table.rows)
    assert (encoded.shape, encoded.dtype) == ((stored.rows, stored.dim), stored.dtype)
    assert encoded.nbytes == stored.nbytes == table.rows * value_type.row_bytes(table)


def test_the_widest_rows_there_are_can_be_sent_as_int8() -> None:
    encoded = ValueType.INT8.encoded_spec(TableSpec("wide", 1, MAX_DIM))
    assert (encoded.dim, encoded.dtype) == (MAX_DIM + 8, np.dtype("u1"))


@given(tables(), st.sampled_from(ValueType))
def test_no_type_is_chosen_that_takes_more_bytes(table: TableSpec, wanted: ValueType) -> None:
    """But for a TBE, which takes no other: two values of fp32 are sent as 8 bytes, for int8 would take 10."""
    own = own_type(table)
    assert own.row_bytes(table) == table.dim * table.dtype.itemsize
    gains = wanted.tbe_bits or wanted.row_bytes(table) < own.row_bytes(table) or wanted.dtype == table.dtype
    assert sent_as(table, wanted) is (wanted if gains else own)


@pytest.mark.parametrize("dtype", VALUE_TYPES, ids=str)
@pytest.mark.parametrize("value_type", ValueType)
@given(values=rows(), step=st.sampled_from([0.0, 1e-7, 1e-3, 0.5, 2.0]), data=st.data())
def test_rows_differ_if_they_would_be_encoded_as_other_bits(
    value_type: ValueType, dtype: np.dtype[np.generic], values: Floats, step: float, data: st.DataObject
) -> None:
    """Of rows some have moved; one may be held with a changed byte."""
    largest = LARGEST if dtype == FP32 else LARGEST_FP16
    before = np.clip(widened(values, value_type), -largest, largest).astype(dtype)
    held = value_type.encode(before).copy()
    if data.draw(st.booleans()):
        held.view(np.uint8)[-1, data.draw(st.integers(0, held.nbytes // len(held) - 1))] ^= 1
    moved, chosen = (data.draw(hnp.arrays(np.bool_, len(before))) for _ in range(2))
    now, ids = np.where(moved[:, None], before * before.dtype.type(1 - step), before), np.flatnonzero(chosen)
    norms, differs = value_type.compare(now, held, ids)
    assert differs.tolist() == [bits(value_type.encode(now[[row]])) != bits(held[[row]]) for row in ids]
    decoded = value_type.decode(held[ids], dtype).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.minimum(np.linalg.norm(now[ids].astype(np.float64) - decoded, axis=1), 1e100)
    finite = np.isfinite(expected)  # A changed bit can make an infinite number.
    np.testing.assert_allclose(norms[finite], expected[finite], rtol=1e-12)
