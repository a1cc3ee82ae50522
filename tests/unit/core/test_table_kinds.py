"""What differs between kinds of tables: what they may hold, and what policies may do to them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.mapping import new_view_table

from deltasync.core.delivery import Delivery
from deltasync.core.digests import checksum_of, squared_norms
from deltasync.core.errors import InvalidInput
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.table_records import delivery_of_record, spec_of_record, spec_record
from deltasync.core.tables import STATE_TYPES, TableKind, TableSpec
from deltasync.core.threads import not_shared_yet
from deltasync.core.value_types import ValueType
from deltasync.views.records import table_record
from deltasync.wire.messages import (
    delivery_from_message,
    delivery_to_message,
    table_from_message,
    table_to_message,
)

INT64 = np.dtype("<i8")
USER = TableSpec("sparse.user", 10, 4)
MAP = TableSpec("map.raw_ids", 10, 1, INT64, TableKind.ID_MAP, "sparse.user")
RANGES = TableSpec("map.id_ranges", 10, 3, INT64, TableKind.ID_RANGES, "sparse.user")


def buffer(dtype: np.dtype[Any]) -> TableSpec:
    return TableSpec("norm.running_mean", 3, 2, dtype, TableKind.BUFFER)


SPECS = [
    USER,
    MAP,
    RANGES,
    TableSpec("top.weight", 3, 5, kind=TableKind.PARAMETER),
    *(buffer(dtype) for dtype in STATE_TYPES),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_messages_and_records_say_what_a_table_is(spec: TableSpec) -> None:
    assert table_from_message(table_to_message(spec)) == spec
    assert spec_of_record(spec_record(spec)) == spec
    delivery = Policy(value_type=ValueType.INT8).delivery_of(spec)
    assert delivery_from_message(delivery_to_message(delivery), Mode.EMBEDDINGS) == delivery


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": INT64}, "values of type int64, expected one of float32, float16"),
        ({"kind": TableKind.BUFFER, "dtype": np.dtype("<c8")}, "values of type complex64, expected one of"),
        ({"kind": TableKind.ID_MAP, "dtype": INT64, "dim": 1}, "names '' as its table"),
        ({"kind": TableKind.BUFFER, "of": "other"}, "names 'other' as its table"),
        ({"kind": TableKind.ID_MAP, "of": "t", "dim": 1}, "has 1 values of float32 in a row, expected 1 of int64"),
        ({"kind": TableKind.ID_RANGES, "of": "t", "dtype": INT64}, "has 2 values of int64 in a row, expected 3"),
    ],
)
def test_what_no_kind_of_table_can_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        replace(TableSpec("t", rows=5, dim=2), **fields)


def test_only_buffers_hold_what_is_not_finite() -> None:
    values = np.array([[np.nan, -np.inf]], np.float32)
    for kind in TableKind.EMBEDDING, TableKind.PARAMETER:
        with pytest.raises(InvalidInput, match="NaN and infinity are not published"):
            RowBatch.of_table(TableSpec("t", 3, 2, kind=kind), np.array([1]), values).check()
    RowBatch.of_table(TableSpec("t", 3, 2, kind=TableKind.BUFFER), np.array([1]), values).check()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("spec", SPECS[1:], ids=str)
def test_a_policy_sends_all_but_embedding_tables_bit_by_bit(spec: TableSpec, mode: Mode) -> None:
    delivery = Policy(value_type=ValueType.INT8, mode=mode).delivery_of(spec)
    assert delivery.value_type is None
    assert (delivery.encoded_spec.dim, delivery.encoded_spec.dtype) == (spec.dim, spec.dtype)


def test_who_follows_a_table_follows_its_map() -> None:
    policy = Policy(tables=("*.user",))
    assert [policy.follows(spec) for spec in (USER, MAP, RANGES, buffer(INT64))] == [True, True, True, False]


def test_a_byte_budget_is_for_embedding_tables() -> None:
    large = TableSpec("top.weight", 3, 5000, kind=TableKind.PARAMETER)
    Policy(max_bytes=100).check([USER, large])
    with pytest.raises(InvalidInput, match="max_bytes 20"):
        Policy(max_bytes=20).check([USER, large])


def test_digests_are_of_any_bits() -> None:
    ids = np.arange(2)
    for dtype in STATE_TYPES:
        some = np.array([[1, 0], [0, 1]], dtype)
        other = some.copy()
        other[1, 0] = 1
        assert checksum_of(ids, some) != checksum_of(ids, other)
    odd = squared_norms(np.array([[np.nan, 1.0], [np.inf, -1e300]]))
    assert np.isfinite(odd).all()


def bits_of(spec: TableSpec, seed: int) -> Values:
    """Rows of any bits, NaN among them; True and False in bools."""
    raw = np.random.default_rng(seed).integers(0, 256, (spec.rows, spec.dim * spec.dtype.itemsize), np.uint8)
    return (raw % 2 if spec.dtype == np.bool_ else raw).view(spec.dtype)


@pytest.mark.parametrize("spec", [MAP, *(buffer(dtype) for dtype in STATE_TYPES)], ids=str)
def test_a_view_sees_every_bit_that_changes(spec: TableSpec, tmp_path: Path) -> None:
    source, ids = StampedTable.zeros(spec), np.arange(spec.rows)
    source.apply(RowBatch.of_table(spec, ids, bits_of(spec, 1)), 1)
    delivery = Policy(value_type=ValueType.INT8, top_k=1).delivery_of(spec)
    view = new_view_table(source, delivery, tmp_path)
    assert delivery_of_record(table_record(view), spec) == delivery == Delivery(spec, None, Mode.EMBEDDINGS)
    with not_shared_yet():
        view.copy(ids, 1)
        assert view.held.rows.tobytes() == source.rows.tobytes()
        changed = source.rows.copy()
        changed.view(np.uint8)[1, -1] ^= 1
        source.apply(RowBatch.of_table(spec, ids, changed), 2)
        dirty = view.find_dirty(1)
    assert (dirty.ids.tolist(), dirty.norms.tolist()) == ([1], [0.0])
    assert source.norm == view.held.norm == 0.0


def test_no_norm_of_what_changes_is_infinite(tmp_path: Path) -> None:
    """JSON knows of none."""
    spec = TableSpec("top.weight", 2, 2, np.dtype("<f8"), TableKind.PARAMETER)
    source, ids = StampedTable.zeros(spec), np.arange(2)
    source.apply(RowBatch.of_table(spec, ids, np.full((2, 2), 1e308)), 1)
    view = new_view_table(source, Policy(top_k=1).delivery_of(spec), tmp_path)
    with not_shared_yet():
        view.copy(ids, 1)
        source.apply(RowBatch.of_table(spec, ids, np.full((2, 2), -1e308)), 2)
        dirty = view.find_dirty(1)
    assert dirty.ids.tolist() == [0, 1]
    assert np.isfinite(dirty.norms).all()
