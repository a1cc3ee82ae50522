"""Rows are ranked as sorting them would."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.kernels.ranking import rank_rows, split_amounts, take_largest


def ranks_of(norms: NDArray[np.float64], never_sent: NDArray[np.bool_]) -> NDArray[np.uint64]:
    ranks = np.empty(len(norms), np.uint64)
    rank_rows(norms.view(np.uint64), never_sent, ranks)
    return ranks


def taken_by_sorting(
    norms: NDArray[np.float64],
    never_sent: NDArray[np.bool_],
    wanted: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    budget: int,
) -> NDArray[np.bool_]:
    """What `take_largest` takes, with a sort; the sizes are those of each row."""
    ordered = np.lexsort((-norms, ~never_sent))  # Stable: equal rows stay in order.
    ordered = ordered[wanted[ordered]]
    fit = np.searchsorted(np.cumsum(sizes[ordered]), budget, side="right")
    taken = np.zeros(len(norms), np.bool_)
    taken[ordered[:fit]] = True
    return taken


@pytest.mark.parametrize("count", [1, 2, 999, 50_000, 99_999, 100_000, 200_000])
def test_of_many_rows_so_many_are_taken(count: int) -> None:
    norms = np.abs(np.random.default_rng(0).standard_normal(100_000)).round(3)  # Many of them are equal.
    never_sent, every = np.arange(100_000) % 7 == 0, np.ones(100_000, np.bool_)
    sizes = np.ones(100_000, np.int64)
    expected = taken_by_sorting(norms, never_sent, every, sizes, count)
    for some in (sizes, sizes[:1]):
        taken = take_largest(ranks_of(norms, never_sent), some, every, count)
        assert np.array_equal(taken, expected)
    assert np.count_nonzero(taken) == min(count, 100_000)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(1, 2**62), st.booleans()), max_size=30))
def test_amounts_are_sums(rows: list[tuple[float, int, bool]]) -> None:
    norms, since = np.array([row[0] for row in rows], np.float64), np.array([row[1] for row in rows], np.int64)
    count, of_taken, of_left, oldest = split_amounts(norms, since, np.array([row[2] for row in rows], np.bool_))
    left = [row for row in rows if not row[2]]
    assert count == len(rows) - len(left)
    assert of_taken == pytest.approx(math.fsum(norm**2 for norm, _, is_taken in rows if is_taken), rel=1e-9)
    assert of_left == pytest.approx(math.fsum(norm**2 for norm, *_ in left), rel=1e-9)
    assert oldest == min((row[1] for row in left), default=0)
