"""Rows are ranked as sorting them would."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.kernels.dirty_rows import rank_rows, split_amounts, take_largest

NORMS = st.sampled_from([0.0, 5e-324, 1e-300, 0.5, np.nextafter(0.5, 1), 1.0, 3.0, 1e100]) | st.floats(0, 1e100)


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


@given(st.data())
def test_the_largest_rows_are_those_that_sorting_gives(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 60))
    masks = st.lists(st.booleans(), min_size=rows, max_size=rows)
    norms = np.array(data.draw(st.lists(NORMS, min_size=rows, max_size=rows)), np.float64)
    never_sent, wanted = (np.array(data.draw(masks), np.bool_) for _ in range(2))
    alike = data.draw(st.booleans())
    drawn = data.draw(
        st.lists(st.sampled_from([1, 12, 300]), min_size=1 if alike else rows, max_size=1 if alike else rows)
    )
    sizes = np.array(drawn, np.int64)
    budget = data.draw(st.integers(0, 40) | st.integers(0, 2000))
    taken = take_largest(ranks_of(norms, never_sent), sizes, wanted, budget)
    each = np.broadcast_to(sizes, rows) if alike else sizes
    assert taken.tolist() == taken_by_sorting(norms, never_sent, wanted, each, budget).tolist()


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
