"""What one more value type takes: a coding, a line of the enum, and its number in the .proto file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.documents import ROOT
from tests.support.mapping import new_view_table

from deltasync.core.delivery import Delivery
from deltasync.core.mode import Mode
from deltasync.core.numbered import Numbered
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.table_records import delivery_of_record
from deltasync.core.tables import VALUE_TYPES, TableKind, TableSpec
from deltasync.core.threads import not_shared_yet
from deltasync.core.value_types import Coding, Encoded, ValueType
from deltasync.v1 import tables_pb2
from deltasync.views.records import table_record
from deltasync.wire.messages import (
    delivery_from_message,
    delivery_to_message,
)

TABLE = TableSpec("t", 40, 16)
SOURCES = ROOT / "sync_service" / "deltasync"


class Signs(Coding):
    """Of every value only whether it is negative: 1 or 0; a row ends in three more numbers."""

    dtype = np.dtype("u1")

    def width(self, dim: int) -> int:
        return dim + 3

    def encode(self, values: Values) -> Encoded:
        return np.pad(np.signbit(values), ((0, 0), (0, 3)))

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        return (1 - 2 * encoded[:, :-3].astype(np.float32)).astype(dtype)


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ValueType]:
    """A value type that was not there when the other modules were imported."""
    added: Any = object.__new__(ValueType)
    added._name_, added._value_, added.number = "SIGNS", "signs", 99
    added.__init__("signs", 99, Signs())
    monkeypatch.setitem(ValueType._member_map_, "SIGNS", added)
    monkeypatch.setitem(ValueType._value2member_map_, "signs", added)
    ValueType._member_names_.append("SIGNS")
    yield added
    ValueType._member_names_.remove("SIGNS")


def test_a_new_value_type_goes_from_the_policy_over_wire_and_disk_to_the_replica(
    signs: ValueType, tmp_path: Path
) -> None:
    policy = Policy.from_dict({"value_type": "signs"})
    assert policy.as_dict()["value_type"] == "signs"
    assert Policy.from_dict(policy.as_dict()) == policy
    delivery = policy.delivery_of(TABLE)
    assert delivery == Delivery(TABLE, signs, Mode.EMBEDDINGS)
    assert (delivery.wire_spec.row_bytes, policy.row_bytes(TABLE)) == (8 + 19, 8 + 19)
    received = delivery_from_message(delivery_to_message(delivery), delivery.mode)
    assert (received, received.wire_spec) == (delivery, delivery.wire_spec)

    source = StampedTable.zeros(TABLE)
    rows = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    source.apply(RowBatch.of_table(TABLE, np.arange(40), rows), 1)
    view = new_view_table(source, delivery, tmp_path)
    assert delivery_of_record(table_record(view), TABLE) == delivery
    with not_shared_yet():
        view.copy(np.arange(40), 1)
        held = received.decode(view.held.rows_of(np.arange(40)))
        assert held.tolist() == np.where(np.signbit(source.rows), -1, 1).tolist()
        moved = np.stack([source.rows[3] * 2, -source.rows[9]])
        source.apply(RowBatch.of_table(TABLE, np.array([3, 9]), moved), 2)
        assert view.find_dirty(1).ids.tolist() == [9]


# Types of numbers that releases do not encode in: those of tables that are no embedding tables.
OWN_TYPES = {
    f"VALUE_TYPE_{name}": 5 + place
    for place, name in enumerate(["FP64", "INT64", "INT32", "INT16", "UINT8", "BOOL"])
}


@pytest.mark.parametrize("kind", [ValueType, Mode, TableKind])
def test_names_and_numbers_are_those_of_the_proto_file(kind: type[Numbered]) -> None:
    enum = tables_pb2.DESCRIPTOR.enum_types_by_name[kind.__name__]
    prefix = re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__).upper()
    numbers = {f"{prefix}_{member.name}": member.number for member in kind}
    numbers |= OWN_TYPES if kind is ValueType else {}
    assert {**numbers, f"{prefix}_UNSPECIFIED": 0} == {value.name: value.number for value in enum.values}
    words = [member.value.replace("-", " ") for member in kind]
    assert words == [member.name.lower().replace("_", " ") for member in kind]


def test_no_other_file_asks_which_value_type_it_is() -> None:
    named = {
        (path.name, name)
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r"ValueType\.[A-Z]\w*|VALUE_TYPE_[A-Z]\w*", path.read_text())
    }
    halves = {("tensor.py", f"ValueType.{name}") for name in ("FP16", "BF16")}  # Types of torch, too.
    assert named == {("policy.py", "ValueType.FP32"), *halves}  # The default.


@given(st.sampled_from(VALUE_TYPES), st.integers(1, 9), st.sampled_from(ValueType), st.sampled_from(Mode))
def test_what_is_sent_of_a_table_comes_back_as_it_was(
    dtype: np.dtype[np.generic], dim: int, value_type: ValueType, mode: Mode
) -> None:
    delivery = Delivery(TableSpec("t", 3, dim, dtype), value_type, mode)
    message = tables_pb2.Table.FromString(delivery_to_message(delivery).SerializeToString())
    assert delivery_from_message(message, mode) == delivery
