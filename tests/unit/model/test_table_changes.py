"""What becomes of a model's tables when a run announces its own, and which of them policies follow."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import Contradiction
from deltasync.core.policy import Policy
from deltasync.core.seal import SealHistory
from deltasync.core.table_memory import RAM
from deltasync.core.tables import TableKind, TableSpec
from deltasync.model.applied_tables import AppliedTables, changes

USER = TableSpec("user", 40, 4)
DENSE = TableSpec("over.weight", 3, 4)
PARAMETER = TableSpec("over.weight", 3, 4, kind=TableKind.PARAMETER)
BUFFER = TableSpec("over.weight", 3, 4, kind=TableKind.BUFFER)
MAP = TableSpec("user.raw_ids", 40, 1, np.dtype("<i8"), TableKind.ID_MAP, "user")


def changed(known: TableSpec, announced: TableSpec, *, later_run: bool = True) -> list[TableSpec]:
    return changes("clicks", {known.name: known}, [announced], later_run=later_run)


def test_which_tables_a_run_may_announce() -> None:
    assert changed(USER, MAP, later_run=False) == [MAP]
    for table in (USER, PARAMETER, BUFFER, MAP):
        assert changed(table, table) == changed(table, table, later_run=False) == []
    for table in (USER, PARAMETER, MAP):
        larger = TableSpec(table.name, 41, table.dim, table.dtype, table.kind, table.of)
        assert changed(table, larger) == [larger]
        with pytest.raises(Contradiction):
            changed(table, larger, later_run=False)


def test_a_refusal_says_both_and_what_to_do() -> None:
    with pytest.raises(Contradiction) as refused:
        changed(USER, TableSpec("user", 39, 4))
    assert str(refused.value) == (
        "table 'user' of model 'clicks' is 40 x 4 float32, the run has 39 x 4 float32: a later run may only add "
        "rows to a table; publish it under another model (SyncOptions(model=...), "
        "--model NAME) or another table name"
    )


@pytest.mark.parametrize(
    ("known", "announced", "said"),
    [
        (USER, TableSpec("user", 41, 5), "is 40 x 4 float32, the run has 41 x 5 float32"),
        (USER, TableSpec("user", 40, 4, np.dtype("<f2")), "the run has 40 x 4 float16"),
        (DENSE, TableSpec(DENSE.name, 3, 4, np.dtype("<i8"), TableKind.BUFFER), "the run has buffer 3 x 4 int64"),
        (DENSE, PARAMETER, "is embedding 3 x 4 float32, the run has parameter 3 x 4 float32"),
        (PARAMETER, BUFFER, "is parameter 3 x 4 float32, the run has buffer 3 x 4 float32"),
        (
            PARAMETER,
            TableSpec(DENSE.name, 2, 4),
            "is parameter 3 x 4 float32, the run has embedding 2 x 4 float32",
        ),
        (
            MAP,
            TableSpec(MAP.name, 40, 1),
            "is id map 40 x 1 int64 of 'user', the run has embedding 40 x 1 float32",
        ),
        (
            MAP,
            TableSpec(MAP.name, 40, 1, np.dtype("<i8"), TableKind.ID_MAP, "item"),
            "of 'user', the run has 40 x 1 int64 of 'item'",
        ),
    ],
)
def test_anything_else_is_refused(known: TableSpec, announced: TableSpec, said: str) -> None:
    with pytest.raises(Contradiction) as refused:
        changed(known, announced)
    assert said in str(refused.value)


SPECS = st.builds(
    TableSpec,
    st.just("t"),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([np.dtype("<f4"), np.dtype("<f2")]),
    st.sampled_from([TableKind.EMBEDDING, TableKind.PARAMETER, TableKind.BUFFER]),
)


@given(st.lists(SPECS, max_size=8))
def test_rows_are_never_fewer_and_values_never_others(announced: list[TableSpec]) -> None:
    known: dict[str, TableSpec] = {}
    for table in announced:
        before = known.get("t")
        try:
            known |= {each.name: each for each in changes("m", known, [table], later_run=True)}
        except Contradiction:
            assert known.get("t") == before
        else:
            after = known["t"]
            assert (after.rows, after.dim, after.dtype) == (table.rows, table.dim, table.dtype)
            if before:
                assert (before.dim, before.dtype) == (after.dim, after.dtype)
                assert before.rows <= after.rows
                assert before.kind is after.kind


NAMES = ("user", "item", "towers.user", "ad")
PATTERNS = st.lists(st.sampled_from(["*", "user", "*user", "i*", "none"]), min_size=1, max_size=2, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(NAMES), PATTERNS), max_size=20)


@given(STEPS)
def test_what_is_followed_is_what_the_patterns_say(steps: list[tuple[str, str, list[str]]]) -> None:
    store: Any = SimpleNamespace(removed={}, describe=lambda *_: None)

    async def run(function: Callable[..., object], *args: object) -> object:
        return function(*args)

    async def play() -> None:
        tables = AppliedTables("clicks", store, RAM, SealHistory(), run, lambda: None)
        for step, name, patterns in steps:
            if step == "add":
                await tables.add([TableSpec(name, 1, 2)])
            elif name in {each.spec.name for each in tables}:
                await tables.remove(name)
            for _ in range(2):
                policy = Policy(tables=tuple(patterns))
                assert tables.followed(policy) == tuple(each for each in tables if policy.follows(each.spec))

    asyncio.run(play())
