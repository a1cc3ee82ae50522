"""What a policy says, and which ones are refused."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deltasync.base.errors import InvalidInput
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

USER, ITEM = TableSpec("user.embedding", 100, 16), TableSpec("item", 100, 4)
HALF = TableSpec("half", 100, 16, np.dtype("<f2"))

# An id, and one value of two bytes.
SMALLEST_ROW = 10

DEFAULTS = {
    "tables": ["*"],
    "mode": "embeddings",
    "top_k": None,
    "top_k_per_table": False,
    "max_age_seconds": None,
    "min_interval_seconds": 0.0,
    "max_bytes": None,
    "value_type": "fp32",
    "ready_within_seconds": None,
}
KEYS = DEFAULTS.keys()


def numbers_in(message: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?", message)]


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    """Policies that can be met, as JSON knows them."""
    top_k = draw(st.none() | st.integers(1, 1000) | st.floats(0.001, 0.999))
    interval = draw(st.integers(0, 100) | st.floats(0, 100))
    smallest = SMALLEST_ROW * (int(top_k) if top_k is not None and top_k >= 1 else 1)
    return {
        "tables": draw(st.lists(st.text("ab*?", min_size=1), min_size=1, max_size=3)),
        "mode": draw(st.sampled_from(["embeddings", "ids"])),
        "top_k": top_k,
        "top_k_per_table": draw(st.booleans()),
        "max_age_seconds": draw(st.none() | st.floats(max(interval, 0.001), 1e6)),
        "min_interval_seconds": interval,
        "max_bytes": draw(st.none() | st.integers(smallest, 2**40)),
        "value_type": draw(st.sampled_from(["fp32", "fp16", "bf16", "int8"])),
        "ready_within_seconds": draw(st.none() | st.floats(1, 1e9)),
    }


@given(descriptions(), st.sets(st.sampled_from(sorted(KEYS))))
def test_a_policy_goes_through_json_unchanged(described: dict[str, Any], left_out: set[str]) -> None:
    if left_out & {"min_interval_seconds", "top_k"}:
        left_out |= {"max_age_seconds", "max_bytes"}
    given_keys = {key: value for key, value in described.items() if key not in left_out}
    policy = Policy.from_dict(given_keys)
    as_dict = policy.as_dict()
    assert as_dict.keys() == KEYS
    assert as_dict == {**Policy().as_dict(), **given_keys}
    assert Policy.from_dict(json.loads(json.dumps(as_dict))) == policy


def test_the_default_is_everything_as_it_is_and_at_once() -> None:
    assert Policy.from_dict({}) == Policy()
    assert Policy().sends_everything
    assert Policy().as_dict() == DEFAULTS


def test_a_policy_that_asks_for_less_does_not_send_everything() -> None:
    less: list[dict[str, Any]] = [{"tables": ["user*"]}, {"mode": "ids"}, {"top_k": 5}, {"top_k": 0.5}]
    less += [{"max_age_seconds": 5}, {"min_interval_seconds": 5}, {"max_bytes": 5000}, {"value_type": "int8"}]
    for described in less:
        assert not Policy.from_dict(described).sends_everything, described
        assert not Policy.from_dict(described | {"ready_within_seconds": 30}).sends_everything, described
    assert Policy(ready_within_seconds=30).sends_everything


NAN, INFINITY = float("nan"), float("inf")
BEYOND_FLOATS, BEYOND_TEXT = 10**400, 10**5000
WRONG: dict[str, list[Any]] = {
    "tables": ["user*", None, ["user*", 3], {"user*": 1}, [], [""], ["user*", ""]],
    "mode": ["values", "IDS", None, 3, ["ids"], {}],
    "top_k": ["10", True, [10], BEYOND_FLOATS, BEYOND_TEXT, NAN, INFINITY, 0, -1, -0.5, 1.5, 1.0, 10.0],
    "top_k_per_table": [1, "yes", None],
    "max_age_seconds": ["5", False, 0, -1, NAN, INFINITY],
    "min_interval_seconds": [None, "5", -0.1, NAN, INFINITY, BEYOND_FLOATS],
    "max_bytes": [0, -5, 1000.0, "1000", True, BEYOND_TEXT],
    "value_type": ["fp64", 8, ["int8"]],
    "ready_within_seconds": [0, 0.999, -1, 1e9 + 1],
}


@pytest.mark.parametrize(
    ("key", "wrong"),
    [(key, each) for key, some in WRONG.items() for each in some],
    ids=lambda each: "huge" if each is BEYOND_TEXT else repr(each)[:20],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_key(key: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="pattern" if wrong in ([], [""]) else key):
        Policy.from_dict({key: wrong})


def test_an_unknown_key_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="'topk'") as refused:
        Policy.from_dict({"topk": 5, "mode": "ids"})
    assert all(key in str(refused.value) for key in KEYS)


@pytest.mark.parametrize(("age", "interval"), [(5, 10), (0.5, 2.25), (86_399, 86_400), (10_000_000, 10_000_001)])
def test_an_age_shorter_than_the_interval_is_refused_with_both_numbers(age: float, interval: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        Policy.from_dict({"max_age_seconds": age, "min_interval_seconds": interval})
    assert numbers_in(str(refused.value)) == [age, interval]
    Policy.from_dict({"max_age_seconds": interval, "min_interval_seconds": interval})


@given(st.integers(2, 10**9), st.integers(1, 10**10))
def test_more_rows_than_bytes_are_refused_with_both_numbers(top_k: int, max_bytes: int) -> None:
    described = {"top_k": top_k, "max_bytes": max_bytes}
    if SMALLEST_ROW * top_k <= max_bytes:
        assert Policy.from_dict(described).max_bytes == max_bytes
        return
    with pytest.raises(InvalidInput) as refused:
        Policy.from_dict(described)
    assert numbers_in(str(refused.value)) == [max_bytes, SMALLEST_ROW * top_k, top_k]


@pytest.mark.parametrize("top_k", [None, 0.5, 1])
def test_fewer_bytes_than_one_row_can_take_are_refused_with_both_numbers(top_k: float | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        Policy(top_k=top_k, max_bytes=SMALLEST_ROW - 1)
    assert numbers_in(str(refused.value)) == [SMALLEST_ROW - 1, SMALLEST_ROW, 1]
    assert Policy(top_k=top_k, max_bytes=SMALLEST_ROW).max_bytes == SMALLEST_ROW


@given(
    st.none() | st.integers(1, 50),
    st.sampled_from(ValueType),
    st.sampled_from(Mode),
    st.integers(SMALLEST_ROW, 5000),
)
def test_max_bytes_must_hold_the_largest_rows_of_top_k(
    top_k: int | None, value_type: ValueType, mode: Mode, max_bytes: int
) -> None:
    assume(SMALLEST_ROW * (top_k or 1) <= max_bytes)
    policy = Policy(top_k=top_k, value_type=value_type, mode=mode, max_bytes=max_bytes)
    tables = [dataclasses.replace(USER, rows=20), ITEM, HALF]
    sizes = sorted((size for table in tables for size in [policy.row_bytes(table)] * table.rows), reverse=True)
    needed = sum(sizes[: top_k or 1])
    if needed <= max_bytes:
        policy.check(tables)
        return
    with pytest.raises(InvalidInput) as refused:
        policy.check(tables)
    assert numbers_in(str(refused.value)) == [max_bytes, needed, top_k or 1]


def test_a_budget_is_not_checked_against_tables_that_are_not_followed() -> None:
    policy = Policy(tables=("item",), top_k=10, max_bytes=10 * (8 + 4 * 4))
    policy.check([USER, ITEM, HALF])
    policy.check([])
    with pytest.raises(InvalidInput, match="of the 10 largest rows"):
        Policy(tables=("*",), top_k=10, max_bytes=10 * (8 + 4 * 4)).check([USER, ITEM])


def test_patterns_that_match_no_table_are_refused_with_the_tables() -> None:
    with pytest.raises(InvalidInput, match=r"tables nosuch, user,item: .*its tables: user\.embedding"):
        Policy(tables=("nosuch", "user,item")).check([USER])


def test_a_top_k_of_every_table_needs_the_bytes_of_them_all() -> None:
    other = TableSpec("other", 100, 4)
    needed = 2 * 10 * (8 + 4 * 4)
    with pytest.raises(InvalidInput) as refused:
        Policy(top_k=10, top_k_per_table=True, max_bytes=needed - 1).check([ITEM, other])
    assert {float(needed - 1), float(needed)} <= set(numbers_in(str(refused.value)))
    Policy(top_k=10, top_k_per_table=True, max_bytes=needed).check([ITEM, other])


@pytest.mark.parametrize(
    ("patterns", "followed"),
    [
        (["*"], {"user.embedding", "item", "half"}),
        (["user*"], {"user.embedding"}),
        (["*e*", "half"], {"user.embedding", "item", "half"}),
        (["ite?"], {"item"}),
        (["?tem", "hal[ef]"], {"item", "half"}),
        (["[!i]*"], {"user.embedding", "half"}),
        (["item", "item"], {"item"}),
        (["tem"], set()),
        (["ITEM"], set()),
        (["user?embedding"], {"user.embedding"}),
    ],
)
def test_the_tables_followed_are_those_that_match_a_pattern(patterns: list[str], followed: set[str]) -> None:
    policy = Policy.from_dict({"tables": patterns})
    assert {table.name for table in (USER, ITEM, HALF) if policy.follows(table)} == followed


@pytest.mark.parametrize(
    ("policy", "unranked"),
    [
        (Policy(top_k=1, tables=("*",)), []),
        (Policy(top_k=1, tables=("i*", "over.w*")), ["over.weight"]),
        (Policy(value_type=ValueType.INT8, tables=("over.*",)), ["over.bias", "over.weight"]),
        (Policy(max_bytes=10_000, tables=("tied", "over.bias")), ["over.bias", "over.weight"]),
        (Policy(min_interval_seconds=1, tables=("over.*",)), []),
    ],
)
def test_what_a_policy_names_and_cannot_rank_is_found(policy: Policy, unranked: list[str]) -> None:
    weight = TableSpec("over.weight", 4, 4, kind=TableKind.PARAMETER, aliases=("tied",))
    bias = TableSpec("over.bias", 1, 4, kind=TableKind.PARAMETER)
    assert policy.unranked([USER, ITEM, weight, bias]) == unranked


@pytest.mark.parametrize(
    ("described", "user", "item", "half"),
    [
        ({}, 8 + 64, 8 + 16, 8 + 32),
        ({"value_type": "fp16"}, 8 + 32, 8 + 8, 8 + 32),
        ({"value_type": "bf16"}, 8 + 32, 8 + 8, 8 + 32),
        ({"value_type": "int8"}, 8 + 24, 8 + 12, 8 + 24),
        ({"mode": "ids"}, 12, 12, 12),
        ({"mode": "ids", "value_type": "int8"}, 12, 12, 12),
    ],
)
def test_a_row_takes_its_id_and_values_or_norm(described: dict[str, Any], user: int, item: int, half: int) -> None:
    policy = Policy.from_dict(described)
    assert [policy.row_bytes(table) for table in (USER, ITEM, HALF)] == [user, item, half]
