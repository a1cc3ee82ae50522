"""Shares, budgets and reasons of a release at their edges; test_view_properties.py compares all with sorting."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deltasync.core.policy import Policy
from deltasync.views.decision import DirtyRows, pick

MAX_AGE = 60.0
# Norm, overdue, forced.
ROWS = st.tuples(st.floats(0, 9), st.booleans(), st.booleans())


def dirty_rows(norms: Sequence[float], *, never: Sequence[int] = (), overdue: Sequence[int] = ()) -> DirtyRows:
    """Rows of these norms; `never` and `overdue` are positions among them."""
    positions = np.arange(len(norms))
    flags = np.isin(positions, list(never)), np.isin(positions, list(overdue))
    return DirtyRows(positions, np.array(norms, np.float64), *flags, np.zeros(len(norms), np.bool_), 20)


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
def test_a_share_is_rounded_up_to_whole_rows(share: float, dirty: int, count: int) -> None:
    picked = pick([dirty_rows([1.0] * dirty)], Policy(top_k=share))
    assert picked.taken[0].tolist() == [True] * count + [False] * (dirty - count)


@pytest.mark.parametrize("share", [1e-7, 1e-12, 5e-324])
@pytest.mark.parametrize("per_table", [False, True])
def test_the_smallest_share_is_one_row(share: float, per_table: bool) -> None:
    picked = pick([dirty_rows([1.0, 2.0, 1.0])], Policy(top_k=share, top_k_per_table=per_table))
    assert picked.taken[0].tolist() == [False, True, False]


@pytest.mark.parametrize("per_table", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_backlog_goes_out_in_releases_of_equal_size(share: float, per_table: bool) -> None:
    """A share of what is left would become smaller and smaller, and the last rows would wait for minutes."""
    policy, left, sizes = Policy(top_k=share, top_k_per_table=per_table), [120, 40], list[int]()
    while sum(left):
        taken = pick([dirty_rows([1.0] * rows) for rows in left], policy, sizes[-1] if sizes else 0).taken
        left = [rows - int(mask.sum()) for rows, mask in zip(left, taken, strict=True)]
        sizes.append(sum(int(mask.sum()) for mask in taken))
    assert sizes == [round(160 * share)] * round(1 / share)


def test_the_reason_mentions_that_no_version_is_newer() -> None:
    assert pick([dirty_rows([1.0] * 20)], Policy(top_k=0.1), rest_after=3).reason == (
        "took 3 of 20 dirty rows: top_k 10 % takes those that have changed most; at least as many as the last "
        "release, as no version is newer"
    )


def test_overdue_rows_precede_ranked_ones_if_not_all_fit() -> None:
    tables = [dirty_rows([5.0, 1.0, 4.0, 2.0], overdue=[1, 3], never=[2])]
    policy = Policy(max_age_seconds=MAX_AGE, max_bytes=60)
    assert pick(tables, policy).taken[0].tolist() == [False, True, True, True]
    fewer = pick(tables, Policy(max_age_seconds=MAX_AGE, max_bytes=39))
    assert fewer.taken[0].tolist() == [False, False, False, True]
    assert fewer.reason == (
        "took 1 of 4 dirty rows: no more than 1 of 4 fit max_bytes 39; 1 were older than max_age_seconds 60"
    )
    none_fits = pick([dirty_rows([1.0, 2.0])], Policy(max_bytes=10))
    assert none_fits.taken[0].tolist() == [False, True], "one is taken all the same"


def test_nothing_limits_a_release_to_a_kept_version_or_of_a_new_run() -> None:
    tables, policy = [dirty_rows([5.0, 1.0, 4.0])], Policy(top_k=1, max_bytes=20)
    kept, run = pick(tables, policy, kept=7), pick(tables, policy, at_once=True)
    assert kept.taken[0].tolist() == run.taken[0].tolist() == [True] * 3
    assert kept.reason == "brings replicas to kept version 7"
    assert run.reason == "took all 3 dirty rows, after a new run or a rollback"


@pytest.mark.parametrize(
    ("norms", "rest"),
    [([], ""), ([1.0], "; and took all 1 dirty row"), ([1.0, 2.0], "; and took 1 of 2 dirty rows")],
)
def test_the_reason_names_new_tables_first(norms: list[float], rest: str) -> None:
    reason = pick([dirty_rows(norms)], Policy(top_k=1), new_tables=[40, 2]).reason
    assert reason.startswith(f"took all 42 rows of 2 tables that the replicas did not have in this form{rest}")


@given(
    st.lists(st.lists(ROWS, max_size=6), min_size=1, max_size=3),
    st.none() | st.integers(1, 9) | st.sampled_from([0.1, 0.5]),
    st.none() | st.integers(20, 300),
)
def test_urgent_rows_come_first_and_the_budget_holds(
    rows: list[list[tuple[float, bool, bool]]], top_k: float | None, max_bytes: int | None
) -> None:
    assume(max_bytes is None or not isinstance(top_k, int) or max_bytes >= 20 * top_k)
    tables = list[DirtyRows]()
    for table in rows:
        old = [at for at, row in enumerate(table) if row[1]]
        must = np.array([row[2] for row in table], np.bool_)
        tables.append(replace(dirty_rows([row[0] for row in table], overdue=old), forced=must))
    policy = Policy(top_k=top_k, max_bytes=max_bytes, max_age_seconds=MAX_AGE)
    taken = np.concatenate(pick(tables, policy).taken)
    forced, overdue = (np.concatenate([getattr(each, name) for each in tables]) for name in ("forced", "overdue"))
    norms, free = np.concatenate([each.norms for each in tables]), ~forced
    assert taken[forced].all()
    if max_bytes is None:
        assert taken[overdue].all()
    else:
        assert 20 * np.count_nonzero(taken & free) <= max_bytes
    left, chosen = norms[free & ~overdue & ~taken], norms[free & ~overdue & taken]
    assert not len(left) or not len(chosen) or left.max() <= chosen.min()
    if (free & overdue & ~taken).any():
        assert not (free & ~overdue & taken).any()
    assert taken.any() or not len(taken)


@pytest.mark.parametrize(("top_k", "said"), [(0.1, "10 %"), (0.0125, "1.25 %"), (1_234_567, "1234567 ")])
def test_the_reason_names_the_top_k_of_the_policy(top_k: float, said: str) -> None:
    ones, none = np.ones(1_234_568), np.zeros(1_234_568, np.bool_)
    dirty = DirtyRows(np.arange(len(ones)), ones, none, none, none, 20)
    assert f"top_k {said}" in pick([dirty], Policy(top_k=top_k)).reason
