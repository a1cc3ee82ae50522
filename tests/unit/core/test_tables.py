"""Names and tables: what they may be, what differs between kinds of tables, and what messages say of them."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.documents import ROOT

from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.base.threads import not_shared_yet
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch, Values, row_ids
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import Mode, TableForm, form_of_record, spec_of_record, spec_record
from deltasync.core.tables import (
    MAX_DIM,
    MAX_ROWS,
    STATE_TYPES,
    VALUE_TYPES,
    Numbered,
    Shard,
    TableKind,
    TableSpec,
    sizes_of,
)
from deltasync.core.value_types import ValueType
from deltasync.v1 import tables_pb2
from deltasync.views.log import table_record
from deltasync.views.table import ViewTable
from deltasync.wire.messages import (
    form_from_message,
    form_to_message,
    table_from_message,
    table_to_message,
)

SOURCES = ROOT / "sync_service" / "deltasync"
TABLE = TableSpec("emb.user", 100, 8)
LETTERS = "abcXYZ019_-"


@given(st.text(LETTERS, min_size=1, max_size=1), st.text(LETTERS + ".", max_size=127))
def test_names_of_letters_digits_and_some_signs_are_taken(first: str, rest: str) -> None:
    assert check_name("model", first + rest) == first + rest


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ä", "a\0", "x" * 129, "a=b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_name("consumer", name)
    assert f"consumer name {name!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "table name ''"),
        ({"name": "x" * 513}, "1 to 512 characters"),
        ({"name": "u\0"}, "table name 'u\\x00': it has a NUL character"),
        ({"name": "u\ud800"}, "table name 'u\\ud800': it has a NUL character, or a lone surrogate"),
        ({"aliases": ("a\0b",), "kind": TableKind.PARAMETER}, "table name 'a\\x00b': it has a NUL character"),
        ({"of": "u\0"}, "table name 'u\\x00': it has a NUL character"),
        ({"rows": 0}, "table 't': 0 rows"),
        ({"rows": MAX_ROWS + 1}, f"table 't': {MAX_ROWS + 1} rows"),
        ({"dim": 0}, "table 't': dim 0"),
        ({"dim": MAX_DIM + 1}, f"table 't': dim {MAX_DIM + 1}"),
        ({"dtype": np.dtype("<f8")}, "table 't': values of type float64"),
        ({"dtype": np.dtype("<i4")}, "table 't': values of type int32"),
        ({"dtype": np.dtype("u1")}, "table 't': values of type uint8"),
        ({"dtype": np.dtype("<u2")}, "table 't': values of type uint16"),
    ],
)
def test_a_wrong_table_is_refused(wrong: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"name": "t", "rows": 1, "dim": 1} | wrong
    with pytest.raises(InvalidInput) as refused:
        TableSpec(**fields)  # type: ignore[arg-type]
    assert said in str(refused.value)


@pytest.mark.parametrize("fields", [("x" * 512, 1, 1), ("t", MAX_ROWS, 1), ("t", 1, MAX_DIM)])
def test_the_bounds_themselves_are_allowed(fields: tuple[str, int, int]) -> None:
    TableSpec(*fields)


def test_bytes_of_a_table() -> None:
    table = TableSpec("t", 10, 3, np.dtype("<f2"))
    assert (table.row_bytes, table.nbytes) == (8 + 6, 60)
    assert Shard(table, 0, 5, 1, 2).row_bytes == 8 + 4


@given(*(st.integers(-1, 120) for _ in range(2)), *(st.integers(-1, 10) for _ in range(2)))
def test_a_shard_lies_inside_its_table(row_offset: int, rows: int, col_offset: int, cols: int) -> None:
    inside = row_offset + rows <= TABLE.rows and col_offset + cols <= TABLE.dim and cols >= 1
    if inside and min(row_offset, rows, col_offset) >= 0:
        Shard(TABLE, row_offset, rows, col_offset, cols)
        return
    with pytest.raises(InvalidInput) as refused:
        Shard(TABLE, row_offset, rows, col_offset, cols)
    assert "shard of table 'emb.user'" in str(refused.value)


# Kinds of tables.

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
    TableSpec("top.heads", 8, 12, kind=TableKind.PARAMETER, sizes=(0, 4, 3), aliases=("over.heads",)),
    TableSpec("top.bias", 1, 5, kind=TableKind.PARAMETER, sizes=(0,)),
    TableSpec("top.scale", 1, 1, kind=TableKind.PARAMETER, sizes=()),
    *(buffer(dtype) for dtype in STATE_TYPES),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_messages_and_records_say_what_a_table_is(spec: TableSpec) -> None:
    assert table_from_message(table_to_message(spec)) == spec
    assert spec_of_record(spec_record(spec)) == spec
    form = Policy(value_type=ValueType.INT8).form_of(spec)
    assert form_from_message(form_to_message(form), Mode.EMBEDDINGS) == form


OF_MAP: dict[str, Any] = {"kind": TableKind.ID_MAP, "of": "t", "dim": 1, "dtype": INT64}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": INT64}, "values of type int64, expected one of float32, float16"),
        ({"kind": TableKind.BUFFER, "dtype": np.dtype("<c8")}, "values of type complex64, expected one of"),
        ({"kind": TableKind.ID_MAP, "dtype": INT64, "dim": 1}, "belongs to table ''"),
        ({"kind": TableKind.BUFFER, "of": "other"}, "belongs to table 'other'"),
        (OF_MAP | {"dtype": np.dtype("<f4")}, "has 1 values of float32 in a row, expected 1 of int64"),
        ({"kind": TableKind.ID_RANGES, "of": "t", "dtype": INT64}, "has 2 values of int64 in a row, expected 3"),
        ({"sizes": (0, 2)}, "of kind 'embedding': only parameters and buffers have a shape"),
        (
            OF_MAP | {"aliases": ("u",)},
            "of kind 'id map': only parameters and buffers have a shape, and maps have no",
        ),
        ({"kind": TableKind.PARAMETER, "sizes": (0, 3)}, r"5 x 2 values cannot have the sizes \[0, 3\]"),
        ({"kind": TableKind.PARAMETER, "sizes": ()}, "cannot have the sizes"),
        ({"kind": TableKind.BUFFER, "aliases": ("u", "u")}, "aliases must be other names"),
        ({"kind": TableKind.BUFFER, "aliases": ("t",)}, "aliases must be other names"),
        ({"kind": TableKind.BUFFER, "aliases": ("",)}, "of 1 to 512 characters"),
    ],
)
def test_what_no_kind_of_table_can_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        replace(TableSpec("t", rows=5, dim=2), **fields)


@pytest.mark.parametrize(
    "ids", [[1, 2], (3,), [], np.array([1, 2], np.uint8), np.array([7], np.uint64), np.array([4], ">i4")]
)
def test_row_ids_are_integers_of_any_type(ids: Any) -> None:
    found = row_ids(USER.name, ids)
    assert (found.dtype, found.tolist()) == (INT64, list(ids))
    assert RowBatch.of_table(USER, ids, np.ones((len(ids), 4), np.float32)).ids.dtype == INT64


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3.2, 5.7], "ids of type float"),
        ([True, False], "ids of type bool"),
        ([1, True], "ids of type bool"),
        ([1, np.True_], "ids of type bool"),
        (np.array([0.0, np.nan]), "ids of type float64"),
        (np.array(["2026-01-01"], "M8[D]"), r"ids of type datetime64\[D\]"),
        (["1"], "ids of type str"),
        ([[1, 2]], "ids of type list"),
        (np.array([[1, 2]]), r"shape \[1, 2\]"),
        (7, r"shape \[\]"),
        ([2**63 + 3], f"an id does not fit into 64 bits, expected at most {2**63 - 1}"),
        (np.array([2**63 + 3]), f"an id does not fit into 64 bits, expected at most {2**63 - 1}"),
        ([10**5000], "an id does not fit into 64 bits"),
    ],
)
def test_what_is_no_row_id_is_refused(ids: Any, said: str) -> None:
    for refused in (partial(row_ids, USER.name), partial(RowBatch.deletes, Shard.whole(USER))):
        with pytest.raises(InvalidInput, match=f"table 'sparse.user': .*{said}"):
            refused(ids)


def test_a_shape_grows_with_its_rows() -> None:
    heads = TableSpec("top.heads", 8, 12, kind=TableKind.PARAMETER, sizes=sizes_of((8, 4, 3)))
    assert heads.shape == (8, 4, 3)
    assert replace(heads, rows=9).shape == (9, 4, 3)
    assert replace(heads, sizes=None).shape is None


@pytest.mark.parametrize("shape", [[7, 4, 3], [8, 12, 0], [8, 4, 4], [96]])
def test_a_message_with_another_shape_than_its_rows_is_refused(shape: list[int]) -> None:
    message = table_to_message(TableSpec("top.heads", 8, 12, kind=TableKind.PARAMETER))
    message.shape.sizes.extend(shape)
    with pytest.raises(InvalidInput, match=r"'top.heads': 8 x 12 values (do not fit the shape|cannot have the s)"):
        table_from_message(message)


def test_only_buffers_hold_what_is_not_finite() -> None:
    values = np.array([[np.nan, -np.inf]], np.float32)
    for kind in TableKind.EMBEDDING, TableKind.PARAMETER:
        with pytest.raises(InvalidInput, match="NaN and infinity cannot be published"):
            RowBatch.of_table(TableSpec("t", 3, 2, kind=kind), np.array([1]), values).check()
    RowBatch.of_table(TableSpec("t", 3, 2, kind=TableKind.BUFFER), np.array([1]), values).check()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@given(st.data(), st.integers(1, 3), st.integers(1, 40))
def test_the_first_number_that_is_not_finite_is_named(
    dtype: str, data: st.DataObject, rows: int, width: int
) -> None:
    shape, kind = (rows, width), np.dtype(dtype)
    values = np.full(shape, data.draw(st.sampled_from([0, -1, np.finfo(kind).max, np.finfo(kind).tiny])), kind)
    places = [(row, column) for row in range(rows) for column in range(width)]
    for place in data.draw(st.sets(st.sampled_from(places), max_size=2)):
        values[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    batch = RowBatch.of_table(TableSpec("t", 9, width, kind, TableKind.PARAMETER), np.arange(rows) + 5, values)
    wrong = np.argwhere(~np.isfinite(values))
    if not len(wrong):
        batch.check()
        return
    with pytest.raises(InvalidInput, match=f"'t': row {wrong[0][0] + 5} holds .* in column {wrong[0][1]};"):
        batch.check()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("spec", SPECS[1:], ids=str)
def test_a_policy_sends_all_but_embedding_tables_bit_by_bit(spec: TableSpec, mode: Mode) -> None:
    form = Policy(value_type=ValueType.INT8, mode=mode).form_of(spec)
    assert form.value_type is None
    assert (form.encoded_spec.dim, form.encoded_spec.dtype) == (spec.dim, spec.dtype)


def test_who_follows_a_table_follows_its_map() -> None:
    policy = Policy(tables=("*.user",))
    assert [policy.follows(spec) for spec in (USER, MAP, RANGES, buffer(INT64))] == [True, True, True, False]


def test_a_byte_budget_is_for_embedding_tables() -> None:
    large = TableSpec("top.weight", 3, 5000, kind=TableKind.PARAMETER)
    Policy(max_bytes=100).check([USER, large])
    with pytest.raises(InvalidInput, match="max_bytes 20"):
        Policy(max_bytes=20).check([USER, large])


def bits_of(spec: TableSpec, seed: int) -> Values:
    """Rows of any bits, NaN among them; True and False in bools."""
    raw = np.random.default_rng(seed).integers(0, 256, (spec.rows, spec.dim * spec.dtype.itemsize), np.uint8)
    return (raw % 2 if spec.dtype == np.bool_ else raw).view(spec.dtype)


@pytest.mark.parametrize("spec", [MAP, *(buffer(dtype) for dtype in STATE_TYPES)], ids=str)
def test_a_view_sees_every_bit_that_changes(spec: TableSpec) -> None:
    source, ids = StampedTable(spec), np.arange(spec.rows)
    source.apply(RowBatch.of_table(spec, ids, bits_of(spec, 1)), 1)
    form = Policy(value_type=ValueType.INT8, top_k=1).form_of(spec)
    with not_shared_yet():
        view = ViewTable(source, form)
        assert form_of_record(table_record(view), spec) == form == TableForm(spec, None, Mode.EMBEDDINGS)
        view.copy(ids)
        assert view.held.rows.tobytes() == source.rows.tobytes()
        changed = source.rows.copy()
        changed.view(np.uint8)[1, -1] ^= 1
        source.apply(RowBatch.of_table(spec, ids, changed), 2)
        found = view.compare(ids)
    assert np.flatnonzero(found.dirty).tolist() == [1]
    assert found.norms[1] == source.norm == view.held.norm == 0.0


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
    halves = {("torch_tensors.py", f"ValueType.{name}") for name in ("FP16", "BF16")}  # Types of torch, too.
    assert named == {("policy.py", "ValueType.FP32"), *halves}  # The default.


@given(st.sampled_from(VALUE_TYPES), st.integers(1, 9), st.sampled_from(ValueType), st.sampled_from(Mode))
def test_what_is_sent_of_a_table_comes_back_as_it_was(
    dtype: np.dtype[np.generic], dim: int, value_type: ValueType, mode: Mode
) -> None:
    form = TableForm(TableSpec("t", 3, dim, dtype), value_type, mode)
    message = tables_pb2.Table.FromString(form_to_message(form).SerializeToString())
    assert form_from_message(message, mode) == form
