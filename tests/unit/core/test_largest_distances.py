"""How far a row can lie from what it is encoded as: never further than is said."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import Values
from deltasync.core.tables import VALUE_TYPES, TableSpec
from deltasync.core.value_types import ValueType, own_type

LOSSY = [(VALUE_TYPES[0], kind) for kind in (ValueType.FP16, ValueType.BF16, ValueType.INT8)]
CASES = [(dtype, kind) for dtype in VALUE_TYPES for kind in ValueType if kind.dtype.itemsize < dtype.itemsize]


@st.composite
def rows(draw: st.DrawFn, dtype: np.dtype[np.generic]) -> Values:
    """Near to each other or not, of any size there is."""
    fp32 = dtype == VALUE_TYPES[0]
    size = draw(st.floats(0, float(np.finfo(np.float32).max), width=32) if fp32 else st.floats(0, 65504, width=16))
    near = draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0]))
    numbers = draw(st.lists(st.floats(-1, 1, width=32), min_size=12, max_size=12))
    values = (np.asarray(numbers) * near + (1 - near)) * size
    return values.reshape(1, 12).astype(dtype)


@pytest.mark.parametrize(("dtype", "kind"), CASES)
@given(data=st.data())
def test_no_row_lies_further_from_what_it_is_encoded_as(
    dtype: np.dtype[np.generic], kind: ValueType, data: st.DataObject
) -> None:
    values = data.draw(rows(dtype))
    encoded = kind.encode(values)
    decoded = kind.decode(encoded, dtype)
    distance = np.linalg.norm(values.astype(np.float64) - decoded.astype(np.float64), axis=1)
    assert distance <= kind.largest_distances(encoded, decoded)


@pytest.mark.parametrize(("dtype", "kind"), LOSSY)
def test_a_row_that_changed_a_lot_lies_further_away(dtype: np.dtype[np.generic], kind: ValueType) -> None:
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(dtype)
    encoded = kind.encode(values)
    bound = kind.largest_distances(encoded, kind.decode(encoded, dtype))
    assert (bound < 0.02 * np.linalg.norm(values, axis=1)).all()


def test_rows_that_are_sent_as_they_are_lie_nowhere_else() -> None:
    for dtype in VALUE_TYPES:
        values = np.ones((2, 4), dtype)
        assert own_type(TableSpec("t", 2, 4, dtype)).largest_distances(values, values).tolist() == [0, 0]


def test_values_half_way_between_two_codes_lie_as_far_away_as_they_can() -> None:
    values = np.array([[0, 255, *(np.arange(100) + 0.5)]], np.float32)
    encoded = ValueType.INT8.encode(values)
    bound = ValueType.INT8.largest_distances(encoded, ValueType.INT8.decode(encoded, VALUE_TYPES[0]))
    assert 5 < bound < 5.2
