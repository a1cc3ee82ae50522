"""Shares, budgets and reasons of a release at their edges; test_view_properties.py compares all with sorting."""

from collections.abc import Sequence

import numpy as np
import pytest

from deltasync.core.policy import Policy
from deltasync.views.picking import DirtyRows, pick

MAX_AGE = 60.0


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
def test_a_share_is_rounded_up_and_a_whole_number_stays_one(share: float, dirty: int, count: int) -> None:
    picked = pick([dirty_rows([1.0] * dirty)], Policy(top_k=share))
    assert picked.taken[0].tolist() == [True] * count + [False] * (dirty - count)


@pytest.mark.parametrize("share", [1e-7, 1e-12, 5e-324])
@pytest.mark.parametrize("per_table", [False, True])
def test_the_smallest_share_is_one_row(share: float, per_table: bool) -> None:
    picked = pick([dirty_rows([1.0, 2.0, 1.0])], Policy(top_k=share, top_k_per_table=per_table))
    assert picked.taken[0].tolist() == [False, True, False]


@pytest.mark.parametrize("per_table", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_rest_goes_out_in_releases_of_equal_size(share: float, per_table: bool) -> None:
    """A share of what is left would become smaller and smaller, and the last rows would wait for minutes."""
    policy, left, sizes = Policy(top_k=share, top_k_per_table=per_table), [120, 40], list[int]()
    while sum(left):
        taken = pick([dirty_rows([1.0] * rows) for rows in left], policy, sizes[-1] if sizes else 0).taken
        left = [rows - int(mask.sum()) for rows, mask in zip(left, taken, strict=True)]
        sizes.append(sum(int(mask.sum()) for mask in taken))
    assert sizes == [round(160 * share)] * round(1 / share)


def test_the_reason_says_that_a_release_is_of_a_rest() -> None:
    assert pick([dirty_rows([1.0] * 20)], Policy(top_k=0.1), rest_after=3).reason == (
        "took 3 of 20 dirty rows: top_k 10 % takes those that have changed most; at least as many as the last "
        "release, as no version is newer"
    )


def test_of_more_than_fits_overdue_rows_go_first_and_then_the_first_of_the_ranking() -> None:
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


@pytest.mark.parametrize(("top_k", "said"), [(0.1, "top_k 10 %"), (0.0125, "top_k 1.25 %"), (1, "top_k 1 ")])
def test_the_reason_names_the_top_k_of_the_policy(top_k: float, said: str) -> None:
    assert said in pick([dirty_rows([1.0] * 20)], Policy(top_k=top_k)).reason


def test_the_reason_names_a_large_top_k_to_the_row() -> None:
    rows = 1_234_568
    none = np.zeros(rows, np.bool_)
    picked = pick([DirtyRows(np.arange(rows), np.ones(rows), none, none, none, 20)], Policy(top_k=rows - 1))
    assert picked.reason.startswith(f"took {rows - 1} of {rows} dirty rows: top_k {rows - 1} takes")
