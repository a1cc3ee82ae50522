"""Which dirty rows a release takes: against a model that sorts tuples."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.policy import Policy
from deltasync.views.ranking import DirtyRows, Pick, pick

MAX_AGE = 60.0
NORMS = st.sampled_from([0.0, 5e-324, 1e-300, 0.5, float(np.nextafter(0.5, 1)), 1.0, 1e300]) | st.floats(0, 1e100)


class Row(NamedTuple):
    """A dirty row; of two, the one that compares less goes first."""

    sent_before: bool
    less_norm: float
    table: int
    id: int
    overdue: bool
    size: int


def rows_of(tables: Sequence[DirtyRows]) -> list[Row]:
    return [
        Row(not never, -norm, number, row, overdue, table.row_bytes)
        for number, table in enumerate(tables)
        for row, norm, never, overdue in zip(
            table.ids.tolist(),
            table.norms.tolist(),
            table.never_sent.tolist(),
            table.overdue.tolist(),
            strict=True,
        )
    ]


def top(rows: Sequence[Row], top_k: float | None) -> list[Row]:
    if top_k is None:
        return list(rows)
    share = ceil(Fraction(str(top_k)) * len(rows))
    return sorted(rows)[: share if top_k < 1 else int(top_k)]


def wanted(rows: Sequence[Row], policy: Policy) -> set[Row]:
    ranked = [[row for row in rows if row.table == table] for table in {row.table for row in rows}]
    groups = ranked if policy.top_k_per_table else [rows]
    return {row for group in groups for row in top(group, policy.top_k)} | {row for row in rows if row.overdue}


def fitting(rows: set[Row], max_bytes: int | None) -> set[Row]:
    taken: list[Row] = []
    for row in sorted(rows, key=lambda row: (not row.overdue, row)):
        if max_bytes is not None and taken and sum(each.size for each in taken) + row.size > max_bytes:
            break
        taken.append(row)
    return set(taken)


def expected(tables: Sequence[DirtyRows], policy: Policy) -> set[Row]:
    return fitting(wanted(rows_of(tables), policy), policy.max_bytes)


def taken_of(tables: Sequence[DirtyRows], picked: Pick) -> set[Row]:
    every, masks = rows_of(tables), [flag for mask in picked.taken for flag in mask.tolist()]
    assert [len(mask) for mask in picked.taken] == [len(table.ids) for table in tables]
    return {row for row, flag in zip(every, masks, strict=True) if flag}


def dirty_rows(
    norms: Sequence[float],
    *,
    never: Sequence[int] = (),
    overdue: Sequence[int] = (),
) -> DirtyRows:
    """Rows of these norms; `never` and `overdue` are positions among them."""
    positions = np.arange(len(norms))
    flags = np.isin(positions, list(never)), np.isin(positions, list(overdue))
    return DirtyRows(positions, np.array(norms, np.float64), *flags, np.zeros(len(norms), np.bool_), 20)


@st.composite
def backlogs(draw: st.DrawFn, *, most: int = 3) -> list[DirtyRows]:
    """Tables of dirty rows, with few different norms, or any."""
    tables = []
    for _ in range(draw(st.integers(0, most))):
        ids = sorted(draw(st.sets(st.integers(0, 99), max_size=9)))
        count = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))
        never, overdue = np.array(draw(count), np.bool_), np.array(draw(count), np.bool_)
        norms = st.lists(NORMS, min_size=len(ids), max_size=len(ids))
        row_bytes = draw(st.sampled_from([12, 16, 40, 300]))
        changed = np.array(draw(norms), np.float64)
        tables.append(
            DirtyRows(np.array(ids, np.int64), changed, never, overdue, np.zeros(len(ids), np.bool_), row_bytes)
        )
    return tables


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    counts = st.integers(1, 12)
    shares = st.integers(1, 999).map(lambda thousandths: thousandths / 1000) | st.sampled_from(
        [0.1, 0.2, 0.25, 0.7]
    )
    top_k = draw(st.none() | counts | shares)
    smallest = 12 * (int(top_k) if top_k is not None and top_k >= 1 else 1)
    return Policy(
        top_k=top_k,
        top_k_per_table=draw(st.booleans()),
        max_age_seconds=MAX_AGE,
        max_bytes=draw(st.none() | st.integers(smallest, smallest + 400)),
    )


@given(backlogs(), policies())
def test_a_release_takes_the_rows_that_sorting_them_gives(tables: list[DirtyRows], policy: Policy) -> None:
    before = rows_of(tables)
    assert taken_of(tables, pick(tables, policy)) == expected(tables, policy)
    assert rows_of(tables) == before


@given(backlogs(), policies())
def test_every_backlog_is_empty_after_at_most_one_release_per_row(tables: list[DirtyRows], policy: Policy) -> None:
    for _ in range(len(rows_of(tables))):
        masks = pick(tables, policy).taken
        left = [
            DirtyRows(
                table.ids[~mask],
                table.norms[~mask],
                table.never_sent[~mask],
                table.overdue[~mask],
                table.forced[~mask],
                table.row_bytes,
            )
            for table, mask in zip(tables, masks, strict=True)
        ]
        assert len(rows_of(left)) < len(rows_of(tables)) or not rows_of(tables)
        tables = left
    assert rows_of(tables) == []


@given(backlogs(), policies())
def test_the_reason_names_the_numbers_of_what_was_taken(tables: list[DirtyRows], policy: Policy) -> None:
    every, want, took = rows_of(tables), wanted(rows_of(tables), policy), expected(tables, policy)
    reason = pick(tables, policy).reason
    if took == set(every):
        assert reason == f"took all {len(every)} dirty row{'s' * (len(every) != 1)}"
        return
    new, old = (sum(flags) for flags in zip(*((not row.sent_before, row.overdue) for row in took), strict=True))
    numbers = {
        r"^took (\d+) of (\d+) dirty rows: ": (len(took), len(every)),
        r"no more than (\d+) of (\d+) fit max_bytes (\d+)": (len(took), len(want), policy.max_bytes),
        r"(\d+) were never sent before": (new,),
        r"(\d+) were older than max_age_seconds 60": (old,),
    }
    said = {
        pattern: tuple(map(int, found.groups())) for pattern in numbers if (found := re.search(pattern, reason))
    }
    absent = {pattern for pattern, values in numbers.items() if values[0] == 0}
    if took == want:
        absent.add(r"no more than (\d+) of (\d+) fit max_bytes (\d+)")
    assert said == {pattern: values for pattern, values in numbers.items() if pattern not in absent}
    assert ("takes those that have changed most" in reason) == (len(want) < len(every))


@pytest.mark.parametrize(
    ("share", "dirty", "count"),
    [
        (0.1, 10, 1),
        (0.1, 30, 3),
        (0.1, 31, 4),
        (0.7, 10, 7),
        (0.29, 100, 29),
        (0.07, 100, 7),
        (0.001, 1, 1),
        (0.999, 10, 10),
    ],
)
def test_a_share_is_rounded_up_and_a_whole_number_stays_one(share: float, dirty: int, count: int) -> None:
    picked = pick([dirty_rows([1.0] * dirty)], Policy(top_k=share))
    assert picked.taken[0].tolist() == [True] * count + [False] * (dirty - count)


@pytest.mark.parametrize("share", [1e-7, 1e-12, 5e-324])
@pytest.mark.parametrize("per_table", [False, True])
def test_the_smallest_share_is_one_row(share: float, per_table: bool) -> None:
    picked = pick([dirty_rows([1.0, 2.0, 1.0])], Policy(top_k=share, top_k_per_table=per_table))
    assert picked.taken[0].tolist() == [False, True, False]


def test_of_more_than_fits_overdue_rows_go_first_and_then_the_first_of_the_ranking() -> None:
    tables = [dirty_rows([5.0, 1.0, 4.0, 2.0], overdue=[1, 3], never=[2])]
    policy = Policy(max_age_seconds=MAX_AGE, max_bytes=60)
    assert pick(tables, policy).taken[0].tolist() == [False, True, True, True]
    fewer = pick(tables, Policy(max_age_seconds=MAX_AGE, max_bytes=39))
    assert fewer.taken[0].tolist() == [False, False, False, True]
    assert fewer.reason == (
        "took 1 of 4 dirty rows: no more than 1 of 4 fit max_bytes 39; 1 were older than max_age_seconds 60"
    )


@pytest.mark.parametrize(("top_k", "said"), [(0.1, "top_k 10 %"), (0.0125, "top_k 1.25 %"), (1, "top_k 1 ")])
def test_the_reason_names_the_top_k_of_the_policy(top_k: float, said: str) -> None:
    assert said in pick([dirty_rows([1.0] * 20)], Policy(top_k=top_k)).reason


def test_the_reason_names_a_large_top_k_to_the_row() -> None:
    rows = 1_234_568
    none = np.zeros(rows, np.bool_)
    picked = pick([DirtyRows(np.arange(rows), np.ones(rows), none, none, none, 20)], Policy(top_k=rows - 1))
    assert picked.reason.startswith(f"took {rows - 1} of {rows} dirty rows: top_k {rows - 1} takes")
