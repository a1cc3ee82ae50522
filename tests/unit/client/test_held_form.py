"""Tables whose rows come in another form than before, as when a policy comes to send them for a TBE."""

import numpy as np
import pytest

from deltasync.client import NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.checksums import TargetChecksums
from deltasync.core.delivery import Delivery, HeldSpec
from deltasync.core.digests import checksum_of
from deltasync.core.mode import Mode
from deltasync.core.rows import Values
from deltasync.core.value_types import ValueType

TABLE = TableSpec("t", 4, 8)
ROWS = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def held_as(value_type: ValueType) -> Delivery:
    return Delivery(TABLE, value_type, Mode.EMBEDDINGS)


def release_of(version: int, table: TableSpec, ids: list[int], values: Values) -> Release:
    rows = RowBatch.of_table(table, np.array(ids), values)
    return Release(Position("h", version), version, 0, version == 1, [table], [rows])


def test_what_replicas_hold_of_a_table_is_as_the_value_type_says() -> None:
    assert held_as(ValueType.FP32).held_spec == TABLE
    half, packed = held_as(ValueType.FP16).held_spec, held_as(ValueType.INT4_TBE).held_spec
    assert isinstance(half, HeldSpec)
    assert (half.dim, half.dtype, half.value_type, half.table_dim) == (8, np.dtype("<f4"), ValueType.FP16, 8)
    assert isinstance(packed, HeldSpec)
    assert (packed.dim, packed.dtype, packed.value_type, packed.table_dim) == (
        8,
        np.dtype("u1"),
        ValueType.INT4_TBE,
        8,
    )
    assert Delivery(TABLE, ValueType.INT4_TBE, Mode.IDS).held_spec == TABLE


@pytest.mark.parametrize("before", ValueType)
@pytest.mark.parametrize("after", ValueType)
def test_a_table_that_comes_in_another_form_is_held_and_counted_anew(before: ValueType, after: ValueType) -> None:
    target, forms = NumpyTarget(), [held_as(before), held_as(after)]
    checksums = TargetChecksums(target)
    for version, form in enumerate(forms, 1):
        rows = form.held(form.encode(ROWS[1:3] * version))
        release = release_of(version, form.held_spec, [1, 2], rows)
        target.apply(release)
        told = checksums.after(release)
        expected = np.zeros((4, rows.shape[1]), rows.dtype)
        expected[1:3] = rows
        np.testing.assert_array_equal(target.tables["t"], expected)
        assert told == {"t": checksum_of(np.arange(4), expected)}
