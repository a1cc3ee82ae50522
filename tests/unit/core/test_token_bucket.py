"""How often something may be done, whatever the times at which it is tried."""

from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.token_bucket import TokenBucket

rates = st.integers(1, 50)
pauses = st.lists(st.floats(0, 3, allow_subnormal=False), max_size=60)


@given(rates, pauses)
def test_in_no_time_more_is_taken_than_comes_and_there_was(rate: int, pauses: list[float]) -> None:
    bucket, now, taken = TokenBucket.full(rate, 0.0), 0.0, list[float]()
    for pause in pauses:
        now += pause
        left = bucket.take(rate, now)
        if left:
            bucket = left
            taken.append(now)
    for first, begun in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= rate + (taken[last] - begun) * rate + 1e-6


@given(rates, st.integers(1, 60))
def test_what_comes_no_faster_is_never_refused(rate: int, number: int) -> None:
    bucket: TokenBucket | None = TokenBucket.full(rate, 0.0)
    for each in range(number):
        assert bucket
        bucket = bucket.take(rate, (each + 1) / rate)


@given(rates, pauses)
def test_one_that_was_left_for_a_second_is_full(rate: int, pauses: list[float]) -> None:
    bucket, now = TokenBucket.full(rate, 0.0), 0.0
    for pause in pauses:
        now += pause
        bucket = bucket.take(rate, now) or bucket
    assert bucket.is_full(rate, now + 1.01)
    assert not (bucket.take(rate, now + 1.01) or bucket).is_full(rate, now + 1.01)
