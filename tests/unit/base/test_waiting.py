"""How long many clients wait before they try again."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.waiting import backoff

FLEET = 300


@given(st.integers(0, 2**32), st.floats(0.05, 300))
def test_a_fleet_does_not_come_back_in_step(seed: int, away_seconds: float) -> None:
    """All have lost the service at one moment. Once it is back, all come within the longest pause, and at most a
    quarter of them within 10 ms.
    """
    random.seed(seed)
    returned = sorted(_returned(away_seconds) for _ in range(FLEET))
    assert returned[-1] - away_seconds <= 5.0
    together = max(sum(start <= each < start + 0.01 for each in returned) for start in returned)
    assert together <= FLEET / 4


def _returned(away_seconds: float) -> float:
    """When one that has lost the service at 0 comes first, once that is back."""
    at = 0.0
    for pause in backoff():
        at += pause
        if at >= away_seconds:
            return at
    raise AssertionError


def test_pauses_grow_up_to_a_bound() -> None:
    pauses = [list(islice(backoff(), 20)) for _ in range(300)]
    assert all(0 < each <= 5 for some in pauses for each in some)
    means = [sum(some) / len(some) for some in zip(*pauses, strict=True)]
    assert means[:6] == pytest.approx([0.055 * 2**number for number in range(6)], rel=0.3)
    assert means[-1] > 2
