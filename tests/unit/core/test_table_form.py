"""What a form finds out about rows: digests as replicas hold them, and whether any bit differs."""

from itertools import product

import numpy as np
import pytest

from deltasync.core.digests import row_digests
from deltasync.core.rows import Values
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import STATE_TYPES, VALUE_TYPES, TableKind, TableSpec
from deltasync.core.value_types import ValueType

# More than one block of rows, and part of another.
ROWS = 5000
DELIVERIES = [
    *(
        TableForm(TableSpec("t", ROWS, 8, dtype), kind, Mode.EMBEDDINGS)
        for dtype, kind in product(VALUE_TYPES, ValueType)
    ),
    *(TableForm.unchanged(TableSpec("b", ROWS, 8, dtype, TableKind.BUFFER)) for dtype in STATE_TYPES),
]
EACH = pytest.mark.parametrize("form", DELIVERIES, ids=lambda each: f"{each.spec.dtype}-{each.value_type}")


def rows_of(form: TableForm) -> Values:
    numbers = np.random.default_rng(0).normal(size=(ROWS, 8)) * 9
    return numbers.astype(form.spec.dtype)


@EACH
def test_digests_of_encoded_rows_are_of_the_rows_as_replicas_hold_them(form: TableForm) -> None:
    rows, ids = rows_of(form), np.arange(1, ROWS, 3)
    encoded = form.encode(rows[ids])
    np.testing.assert_array_equal(form.held_digests(encoded), row_digests(form.held(encoded)))
    assert len(form.held_digests(encoded[:0])) == 0


@EACH
def test_a_row_differs_where_any_bit_does(form: TableForm) -> None:
    rows = rows_of(form)
    held = form.encode(rows).copy()
    ids = np.array([0, 3, 4095, 4096, ROWS - 1])
    assert not form.compare(rows, held, ids)[1].any()
    held.view(np.uint8)[[3, ROWS - 1], [0, -1]] ^= 1
    assert form.compare(rows, held, ids)[1].tolist() == [False, True, False, False, True]
    norms, differs = form.compare(rows, held, ids[:0])
    assert (len(norms), len(differs)) == (0, 0)


@pytest.mark.parametrize("dtype", STATE_TYPES)
def test_what_is_not_trained_is_nowhere_else_whatever_it_holds(dtype: np.dtype[np.generic]) -> None:
    form = TableForm.unchanged(TableSpec("b", 2, 4, dtype, TableKind.BUFFER))
    rows = np.frombuffer(b"\xff" * 8 * dtype.itemsize, dtype).reshape(2, 4)  # NaN, of floats.
    norms, differs = form.compare(rows, np.zeros_like(rows), np.arange(2))
    assert (norms.tolist(), differs.tolist()) == ([0, 0], [True, True])
    assert form.compare(rows, rows.copy(), np.arange(2))[1].tolist() == [False, False]


@pytest.mark.parametrize("dtype", [each for each in STATE_TYPES if each.kind in "fi"], ids=str)
def test_parameters_of_any_type_have_norms(dtype: np.dtype[np.generic]) -> None:
    form = TableForm.unchanged(TableSpec("p", ROWS, 2, dtype, TableKind.PARAMETER))
    rows = np.zeros((ROWS, 2), dtype)
    rows[7], rows[4100] = (3, -4), (0, 2)
    norms, differs = form.compare(rows, np.zeros_like(rows), np.arange(ROWS))
    assert norms[[7, 4100]].tolist() == [5, 2]
    assert np.flatnonzero(norms).tolist() == np.flatnonzero(differs).tolist() == [7, 4100]


def test_no_norm_is_infinite() -> None:
    form = TableForm.unchanged(TableSpec("p", 1, 2, np.dtype("<f8"), TableKind.PARAMETER))
    rows = np.full((1, 2), 1e300)
    assert form.compare(rows, -rows, np.zeros(1, np.int64))[0].tolist() == [1e100]


def test_a_zero_of_the_other_sign_differs_and_is_nowhere_else() -> None:
    for dtype in VALUE_TYPES:
        form = TableForm.unchanged(TableSpec("t", 1, 4, dtype))
        zeros = np.zeros((1, 4), dtype)
        norms, differs = form.compare(zeros, -zeros, np.zeros(1, np.int64))
        assert (norms.tolist(), differs.tolist()) == ([0], [True])
